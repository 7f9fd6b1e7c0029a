"""States of every kind of parallelism, with values that a formula gives: equal on any ranks.

A state is made for a mesh of the ranks that there are, and filled by :func:`fill`; what was loaded
is held against the formula again, so that nothing of a save has to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.equal import bits

__all__ = ["KINDS", "NO_SHARD", "check", "fill", "local_part", "state_of", "value_of"]


class Block(nn.Module):
    """Two layers, a norm and a buffer."""

    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(outer)
        self.up = nn.Linear(outer, inner)
        self.down = nn.Linear(inner, outer, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
EVEN, UNEVEN = (8, 16), (5, 7)


def mesh_of(*names: str, inner: int = 2) -> DeviceMesh:
    """A mesh over all ranks; of two names, the second has up to ``inner`` of them."""
    world = dist.get_world_size()
    if len(names) == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=names)
    inner = min(inner, world)
    return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=names)


def fsdp2() -> nn.Module:
    mesh = mesh_of("shard")
    model = nn.Sequential(Block(*UNEVEN), Block(*UNEVEN))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel() -> nn.Module:
    return parallelize_module(Block(*EVEN), mesh_of("tensor"), PLAN)


def two_dimensional(sizes: tuple[int, int]) -> nn.Module:
    mesh = mesh_of("data", "tensor")
    model = parallelize_module(Block(*sizes), mesh["tensor"], PLAN)
    return fully_shard(model, mesh=mesh["data"])


def hybrid() -> nn.Module:
    return fully_shard(Block(*UNEVEN), mesh=mesh_of("replicate", "shard"))


def data_parallel() -> nn.Module:
    return DistributedDataParallel(Block(*UNEVEN))


def _trained(make: Callable[[], nn.Module]) -> dict[str, Any]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def plain() -> dict[str, Any]:
    return {
        "whole": torch.zeros(7, 3),
        "half": torch.zeros(5, dtype=torch.bfloat16),
        "scalar": torch.zeros(()),
        "empty": torch.zeros(0, 3),
        "transposed": torch.zeros(4, 6).t(),
        "nested": {"list": [torch.zeros(2), {"deep": torch.zeros(3)}], "step": 3, "name": "run"},
    }


def sharded_tensor(*shape: int) -> ShardedTensor:
    """Rows in chunks as FSDP1 cuts them: even, the last ranks with less or with nothing."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = -(-shape[0] // world)
    begin, end = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    shards = []
    if begin < end:
        local = torch.zeros(end - begin, *shape[1:])
        offsets = [begin, *[0] * (len(shape) - 1)]
        shards = [LocalShard.from_tensor_and_offsets(local, offsets, rank)]
    return init_from_local_shards(shards, *shape)


def sharded_tensors(*last: int) -> dict[str, Any]:
    moments = {f"w{n}": sharded_tensor(*shape) for n, shape in enumerate([(8, 3), (7,), last])}
    return {
        "model": {"w0": sharded_tensor(8, 3), "w1": sharded_tensor(7)},
        "optimizer": {
            "state": {"exp_avg": moments, "step": torch.zeros(())},
            "groups": [{"lr": 1}],
        },
    }


def mixed() -> dict[str, Any]:
    state = _trained(fsdp2)
    return state | {
        "flat": {"p": sharded_tensor(11, 2)},
        "plain": plain(),
        "replicated": dtensor((6, 2), torch.float64, Replicate()),
        "ema": _trained(data_parallel)["model"],
    }


NO_SHARD = "ShardedTensor without a shard on the last rank"

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "FSDP2": lambda: _trained(fsdp2),
    "TP": lambda: _trained(tensor_parallel),
    "FSDP2 over TP, even": lambda: _trained(lambda: two_dimensional(EVEN)),
    "FSDP2 over TP, uneven": lambda: _trained(lambda: two_dimensional(UNEVEN)),
    "HSDP": lambda: _trained(hybrid),
    "DDP": lambda: _trained(data_parallel),
    "plain": plain,
    "ShardedTensor": lambda: sharded_tensors(10, 2),
    NO_SHARD: lambda: sharded_tensors(5, 2),
    "mixed": mixed,
}


def state_of(kind: str) -> dict[str, Any]:
    """The state of this rank, its tensors in memory that nobody has written anything into."""
    return KINDS[kind]()


def dtensor(shape: tuple[int, ...], dtype: torch.dtype, placement: Any) -> DTensor:
    """A DTensor over all ranks, of any dtype: nothing is sent."""
    mesh = mesh_of("all")
    local = torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype)
    if isinstance(placement, Shard):
        extent = shape[placement.dim]
        rows = -(-extent // mesh.size())
        begin = min(mesh.get_local_rank() * rows, extent)
        local = local.narrow(placement.dim, begin, min(rows, extent - begin)).contiguous()
    stride = torch.empty(shape, device="meta").stride()
    local = local.view(dtype) if local.dtype != dtype else local
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


def value_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Bytes that the name gives, in any dtype: NaN and denormal numbers come along."""
    count = math.prod(shape) * dtype.itemsize
    raw = ((torch.arange(count, dtype=torch.int64) * 197 + crc32(name.encode())) >> 1).to(
        torch.uint8
    )
    if dtype is torch.bool:
        return (raw & 1).bool().reshape(shape)
    return raw.view(dtype).reshape(shape)


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a nested state."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, f"{path}/{key}")
    elif isinstance(state, (list, tuple)):
        for position, value in enumerate(state):
            yield from leaves(value, f"{path}/{position}")
    else:
        yield path, state


def local_part(path: str, value: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's memory of a tensor, and what the formula says of it."""
    if isinstance(value, ShardedTensor):
        whole = value_of(path, tuple(value.size()), value.dtype)
        for shard in value.local_shards():
            wanted = whole
            places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            for dimension, (begin, count) in enumerate(places):
                wanted = wanted.narrow(dimension, begin, count)
            yield shard.tensor, wanted
        return
    whole = value_of(path, tuple(value.shape), value.dtype)
    if isinstance(value, DTensor):
        yield value.to_local(), split(whole, value)
    else:
        yield value, whole


def split(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part, cut by torch's own placements, one mesh dimension after another."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    # One more dimension of bytes, since not every dtype can be cut and joined.
    part = whole.contiguous().reshape(*whole.shape, 1).view(torch.uint8)
    for index, placement in enumerate(like.placements):
        if placement.is_replicate():
            continue
        count = like.device_mesh.size(index)
        parts, _ = placement._split_tensor(part, count, with_padding=False, contiguous=True)
        part = parts[coordinate[index]]
    return part.contiguous().view(whole.dtype).squeeze(-1)


def fill(state: dict[str, Any]) -> dict[str, Any]:
    """Write the formula's values into every tensor."""
    for path, value in leaves(state):
        if isinstance(value, (torch.Tensor, ShardedTensor)):
            with torch.no_grad():
                for local, wanted in local_part(path, value):
                    if local.dtype.itemsize == 1:  # not all of these have a copy kernel
                        local, wanted = local.view(torch.uint8), wanted.view(torch.uint8)
                    local.copy_(wanted)
    return state


def check(state: dict[str, Any], fresh: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
    """Raise unless every tensor is what the formula says and every other value what it was."""
    values = dict(leaves(fresh))
    found = dict(leaves(state))
    assert list(found) == list(values)
    for path, value in found.items():
        if path in skip:
            continue
        if not isinstance(value, (torch.Tensor, ShardedTensor)):
            assert value == values[path], path
            continue
        for local, wanted in local_part(path, value):
            assert local.shape == wanted.shape, path
            assert torch.equal(bits(local), bits(wanted)), f"{path}: {local} is not {wanted}"
