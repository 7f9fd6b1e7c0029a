"""A small model, and what tests of its optimizers compare."""

from typing import Any

import pytest
import torch
from torch import nn

from dcp_pipeline import StateDictOptions

__all__ = ["LAYOUTS", "bits", "model_of", "plain", "train"]

LAYOUTS = [
    pytest.param(None, id="nested"),
    pytest.param(StateDictOptions(flatten_optimizer_state_dict=True), id="flat"),
]


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def bits(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def plain(state: Any) -> Any:
    """Values that compare with ``==``."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return state
