"""An optimizer's state by the layout of the model, from any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_pipeline import (
    FileSystemReader,
    MissingKeyError,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    save,
    set_optimizer_state_dict,
)
from tests.distributed.pool import Pool
from tests.parallelism.layouts import build

FULL = StateDictOptions(full_state_dict=True)


def plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state


def write(path: Path, name: str, is_flat: bool) -> Any:
    job = build(name)
    job.train(0, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    state = {
        "model": get_model_state_dict(job.model),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer, options=options),
    }
    save(state, checkpoint_id=path / "ours")
    dcp.save(state, checkpoint_id=path / "dcp")
    return plain(get_optimizer_state_dict(job.model, job.optimizer, options=FULL))


def read(path: Path, name: str, writer: str, is_foreign: bool) -> Any:
    job = build(name, lr=1.0)
    reader = (dcp.FileSystemReader if is_foreign else FileSystemReader)(path / writer)
    weights = get_model_state_dict(job.model)
    found = load_sharded_optimizer_state_dict(weights, "optimizer", reader)
    assert list(found) == ["optimizer"]
    set_optimizer_state_dict(job.model, job.optimizer, found["optimizer"])
    kinds = {
        type(value)
        for state in job.optimizer.state.values()
        for value in state.values()
        if value.dim()
    }
    expected = {"fsdp2": DTensor, "ddp": torch.Tensor, "fsdp2 over tensor": DTensor}
    if name in expected:
        assert kinds == {expected[name]}, kinds
    return plain(get_optimizer_state_dict(job.model, job.optimizer, options=FULL))


@pytest.mark.parametrize(
    ("name", "size", "is_flat"),
    [
        ("fsdp2", 2, True),
        ("ddp", 2, False),
        ("fsdp1", 2, False),
        ("fsdp2 over tensor", 4, True),
        pytest.param("fsdp2", 2, False, marks=pytest.mark.slow),
        pytest.param("ddp", 2, True, marks=pytest.mark.slow),
        pytest.param("fsdp1", 2, True, marks=pytest.mark.slow),
        pytest.param("fsdp2 over tensor", 4, False, marks=pytest.mark.slow),
    ],
)
def test_from_one_layout_to_another(
    ranks: Pool, tmp_path: Path, name: str, size: int, is_flat: bool
) -> None:
    expected = ranks(2).run(write, tmp_path, "fsdp2", is_flat)[0]
    for writer, is_foreign in (("ours", False), ("dcp", False), ("ours", True)):
        for found in ranks(size).run(read, tmp_path, name, writer, is_foreign):
            assert found["state"] == expected["state"]
            assert {group["lr"] for group in found["param_groups"]} == {0.05 / 2}


def test_nothing_there(tmp_path: Path) -> None:
    save({"model": {"weight": torch.zeros(1)}}, checkpoint_id=tmp_path / "c")
    with pytest.raises(MissingKeyError, match="'optimizer'"):
        load_sharded_optimizer_state_dict({}, "optimizer", FileSystemReader(tmp_path / "c"))


def sharded() -> list[str]:
    job = build("fsdp1")
    kinds = {type(value).__name__ for value in get_model_state_dict(job.model).values()}
    dist.barrier()
    return sorted(kinds)


def test_fsdp1_has_sharded_tensors(ranks: Pool) -> None:
    assert ShardedTensor.__name__ in ranks(2).run(sharded)[0]
