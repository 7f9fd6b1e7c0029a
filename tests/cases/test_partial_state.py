"""Optimizer state that only some ranks have, of parameters that all of them have."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_pipeline import AppState, StateDictOptions, load, save
from tests.distributed.pool import Pool
from tests.state.optimizers import LAYOUTS, model_of, plain


def on_two_ranks(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A parameter on a mesh of the first two ranks; others know it, and have none of it."""
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        weight = distribute_tensor(torch.full((6, 4), value), mesh, [Shard(0)])
    else:
        weight = DTensor.from_local(
            torch.empty(0, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 4)),
            stride=(4, 1),
        )  # fmt: skip
    model = nn.Module()
    model.weight = nn.Parameter(weight)
    model.bias = nn.Parameter(torch.full((3,), value))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def resume_outside(path: Path, options: StateDictOptions | None) -> Any:
    model, optimizer = on_two_ranks(1.0)
    for parameter in model.parameters():
        if dist.get_rank() < 2 or not isinstance(parameter, DTensor):
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(AppState(model, optimizer, options=options), checkpoint_id=path)
    other, fresh = on_two_ranks(2.0)
    load(AppState(other, fresh, options=options), checkpoint_id=path)
    found = []
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if isinstance(one, DTensor) and dist.get_rank() == 2:
            continue
        for key, value in optimizer.state[one].items():
            before, after = value, fresh.state[two][key]
            if isinstance(value, DTensor):
                before, after = value.to_local(), after.to_local()
            found.append(plain(before) == plain(after))
    return found


@pytest.mark.parametrize("options", LAYOUTS)
def test_ranks_outside_of_a_mesh(ranks: Pool, tmp_path: Path, options: Any) -> None:
    found = ranks(3).run(resume_outside, tmp_path, options)
    assert found == [[True] * 6, [True] * 6, [True] * 3]


def resume_parts(path: Path, options: StateDictOptions | None) -> Any:
    """Each rank steps a part of the parameters, and the others get them from it."""
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Any]:
        parameters = list(model.parameters())
        for step in steps:
            for number, parameter in enumerate(parameters):
                owner = number % 2
                parameter.grad = None
                if owner == dist.get_rank():
                    parameter.grad = torch.full_like(parameter, step + number)
            optimizer.step()
            for number, parameter in enumerate(parameters):
                dist.broadcast(parameter.detach(), number % 2)
        return [parameter.tolist() for parameter in parameters]

    train(model, optimizer, range(2))
    save(AppState(model, optimizer, options=options), checkpoint_id=path)
    load(AppState(other, fresh, options=options), checkpoint_id=path)
    return train(model, optimizer, range(2, 4)) == train(other, fresh, range(2, 4))


@pytest.mark.parametrize("options", LAYOUTS)
def test_each_rank_steps_a_part(ranks: Pool, tmp_path: Path, options: Any) -> None:
    assert ranks(2).run(resume_parts, tmp_path, options) == [True, True]
