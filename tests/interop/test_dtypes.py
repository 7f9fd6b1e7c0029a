"""Every dtype, plain and sharded, from plain DCP to us and back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.tensor import Replicate, Shard

from dcp_pipeline.api import load, save
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.interop.states import check, dtensor, fill
from tests.marks import slow

# Plain DCP fills tensors by copy_, which this dtype does not have.
NOT_LOADED_BY_DCP = ("float4_e2m1fn_x2",)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.zeros(shape, dtype=torch.uint8).view(dtype)
    return torch.zeros(shape, dtype=dtype)


def sharded_tensor(dtype: torch.dtype) -> ShardedTensor:
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = 4 // world
    local = zeros((rows, 3), dtype)
    shard = LocalShard.from_tensor_and_offsets(local, [rank * rows, 0], rank)
    return init_from_local_shards([shard], 4, 3)


def state_of(names: list[str]) -> dict[str, Any]:
    return {
        name: {
            "scalar": zeros((), DTYPES[name]),
            "plain": zeros((3, 5), DTYPES[name]),
            "rows": dtensor((7, 3), DTYPES[name], Shard(0)),
            "columns": dtensor((3, 6), DTYPES[name], Shard(1)),
            "single": dtensor((1,), DTYPES[name], Shard(0)),
            "replicated": dtensor((5,), DTYPES[name], Replicate()),
            "empty": dtensor((0, 2), DTYPES[name], Shard(0)),
            "shards": sharded_tensor(DTYPES[name]),
        }
        for name in names
    }


def write(path: Path) -> None:
    state = fill(state_of(list(DTYPES)))
    dcp.save(state, checkpoint_id=path / "dcp")
    for serialization in ("torch_save", "safetensors"):
        config = {"serialization": serialization}
        save(state, checkpoint_id=path / serialization, config=config)


def read(path: Path) -> None:
    names = list(DTYPES)
    for writer in ("dcp", "torch_save", "safetensors"):
        state = state_of(names)
        load(state, checkpoint_id=path / writer)
        check(state, state_of(names))
    names = [name for name in names if name not in NOT_LOADED_BY_DCP]
    state = state_of(names)
    dcp.load(state, checkpoint_id=path / "torch_save")
    check(state, state_of(names))


SLOW = [slow(*pair) for pair in ((4, 2), (1, 2), (2, 4), (4, 1))]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 1), *SLOW])
def test_every_dtype_both_ways(ranks: Pool, tmp_path: Path, saved_on: int, loaded_on: int) -> None:
    ranks(saved_on).run(write, tmp_path)
    ranks(loaded_on).run(read, tmp_path)
