"""A small sharded training run, for tests of saving and loading what it leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

__all__ = ["full", "sharded_training", "state_of"]


class Block(nn.Module):
    """Two layers of sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.down(torch.relu(self.up(self.norm(value))))


def sharded_training(
    world_size: int, seed: int, steps: int = 2, width: int = 13
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2 and its AdamW after a few steps; equal on any number of ranks."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(11, width), Block(width), Block(width), nn.Linear(width, 5))
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    for block in model[1:3]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        [{"params": model[:2].parameters(), "lr": 0.01}, {"params": model[2:].parameters()}]
    )
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step on data that depends on the step alone."""
    tokens = (torch.arange(12).reshape(3, 4) * (step + 3)) % 11
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state that torch recommends to save."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def full(state: Any) -> Any:
    """The same nested state with every DTensor gathered and every tensor copied."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(full(value) for value in state)
    return state
