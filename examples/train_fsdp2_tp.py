"""FSDP2 over tensor parallelism: train, save, and resume on any mesh.

    torchrun --nproc-per-node 4 examples/train_fsdp2_tp.py outputs/fsdp2_tp 6    # 2 x 2 ranks
    torchrun --nproc-per-node 2 examples/train_fsdp2_tp.py outputs/fsdp2_tp 9    # goes on, on 1 x 2

Each parameter is a DTensor over the mesh that its module is sharded on; what is saved are whole
tensors under the model's own names, so the next job may cut them in another way.
"""

import sys

import torch
import torch.distributed as dist
from counting import CONTEXT, next_byte_loss, sequences
from model import Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dcp_pipeline import AppState, CheckpointManager


def train(root: str, steps: int, tensor_ranks: int = 2) -> list[float]:
    """Train up to ``steps`` from the newest checkpoint in ``root``; the losses."""
    torch.manual_seed(0)
    model = parallel(Decoder(width=32, depth=2, heads=2, context=CONTEXT), tensor_ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with CheckpointManager(root, save_every_steps=3) as checkpoints:
        state = AppState(model, optimizer)
        for step in range((checkpoints.restore(state) or 0) + 1, steps + 1):
            text = sequences(step)  # of real data, each rank of the mesh's "data" takes a share
            loss = next_byte_loss(model(text[:, :-1]), text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if checkpoints.should_save(step):
                checkpoints.async_save(step, state)
    return losses


def parallel(model: Decoder, tensor_ranks: int) -> nn.Module:
    """MLPs and the head are split over ``tensor``; everything is sharded over ``data``."""
    shape = (dist.get_world_size() // tensor_ranks, tensor_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    for block in model.blocks:
        plan = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = train(sys.argv[1], int(sys.argv[2]))
    if dist.get_rank() == 0:
        print(f"{len(found)} steps: {' '.join(f'{loss:.4f}' for loss in found)}")
    dist.destroy_process_group()
