"""Makes the golden checkpoints, once for each release; run by hand on two ranks:

    torchrun --nproc-per-node 2 -m tests.golden.make_golden ours 1.0
    torchrun --nproc-per-node 2 -m tests.golden.make_golden dcp 2.13

in an empty folder, with the repository on ``PYTHONPATH``; what it makes there is copied to
``tests/golden``. ``dcp`` needs nothing but torch, of the version whose checkpoint is wanted. One
that is committed is never made anew.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.golden.values import SHARDED, TRAINING, of_ours, of_ranks, of_training, value_of

__all__ = ["Model", "sharded_of", "training_of"]


class Model(nn.Module):
    """The parameters of :data:`TRAINING`."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in TRAINING.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def placement_of(text: str) -> Any:
    if text == "R":
        return Replicate()
    dimension, _, factor = text[1:].partition("/")
    if factor:
        return _StridedShard(int(dimension), split_factor=int(factor))
    return Shard(int(dimension))


def sharded_of(is_empty: bool) -> dict[str, DTensor]:
    """The entries of :data:`SHARDED` over all ranks, without their values if ``is_empty``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for name, (dtype, shape, text) in SHARDED.items():
        part, placement = value_of(name, shape, dtype), placement_of(text)
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(
                part, dist.get_world_size(), with_padding=False, contiguous=True
            )
            part = parts[dist.get_rank()].clone()
        stride = torch.empty(shape, device="meta").stride()
        if is_empty:
            part.zero_()
        found[name] = DTensor.from_local(
            part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return found


def training_of(is_empty: bool) -> dict[str, Any]:
    """Model and AdamW under FSDP2 on all ranks, with the values of the formula or with zeros."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(Model(), mesh=mesh)
    model_state, optimizer_state = get_state_dict(model, torch.optim.AdamW(model.parameters()))
    state = {"model": model_state, "optimizer": optimizer_state}
    values = of_training()
    for name in TRAINING:
        tensors = {f"model.{name}": model_state[name]}
        moments = optimizer_state["state"][name].items()
        tensors |= {f"optimizer.state.{name}.{key}": value for key, value in moments}
        for key, tensor in tensors.items():
            whole = torch.zeros_like(values[key]) if is_empty else values[key]
            if isinstance(tensor, DTensor):
                parts, _ = tensor.placements[0]._split_tensor(
                    whole, mesh.size(), with_padding=False, contiguous=True
                )
                tensor.to_local().detach().copy_(parts[dist.get_rank()])
            else:
                tensor.copy_(whole)
    return state


def main(writer: str, version: str) -> None:
    """Write the checkpoints of one version into the current folder."""
    dist.init_process_group("gloo")
    if writer == "dcp":
        dcp.save(training_of(is_empty=False), checkpoint_id=f"dcp-{version}")
    else:
        from dcp_pipeline.api import save

        own = f"rank{dist.get_rank()}"
        state = of_ours(sharded_of(is_empty=False)) | {own: of_ranks()[own]}
        for serialization in ("torch_save", "safetensors"):
            config = {"serialization": serialization}
            save(state, checkpoint_id=f"ours-{version}-{serialization}", config=config)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
