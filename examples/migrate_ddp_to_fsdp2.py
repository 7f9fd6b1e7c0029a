"""From DDP to FSDP2: saved under the one, continued under the other, every value equal.

    torchrun --nproc-per-node 2 examples/migrate_ddp_to_fsdp2.py outputs/migrated

Nothing is converted. ``AppState`` takes the wrapper's ``module.`` off the names, DDP's replicas are
written once, and FSDP2's shards are read out of the whole tensors. The fingerprint of a state does
not depend on how it is sharded, so it proves that no bit was lost on the way.
"""

import sys

import torch
import torch.distributed as dist
from counting import CONTEXT, next_byte_loss, sequences
from model import Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dcp_pipeline import AppState, fingerprint, load, save


def migrate(path: str) -> tuple[list[float], list[float]]:
    """Losses of going on under DDP, and of going on under FSDP2, from one checkpoint.

    Raises:
        ValueError: a value changed on the way.
    """
    model: nn.Module = DistributedDataParallel(decoder())
    optimizer = adamw(model)
    train(model, optimizer, range(1, 4))
    saved = save({"app": AppState(model, optimizer)}, checkpoint_id=path).manifest
    under_ddp = train(model, optimizer, range(4, 7))

    model = sharded(decoder())
    optimizer = adamw(model)
    state = {"app": AppState(model, optimizer)}
    load(state, checkpoint_id=path)
    if fingerprint(state) != saved.fingerprint:
        raise ValueError("the state under FSDP2 is not the one that DDP has saved")
    return under_ddp, train(model, optimizer, range(4, 7))


def decoder() -> Decoder:
    return Decoder(width=32, depth=2, heads=2, context=CONTEXT)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded(model: Decoder) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        text = sequences(step)
        loss = next_byte_loss(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name, losses in zip(("DDP", "FSDP2"), migrate(sys.argv[1]), strict=True):
        if dist.get_rank() == 0:
            print(f"{name}: {' '.join(f'{loss:.6f}' for loss in losses)}")
    dist.destroy_process_group()
