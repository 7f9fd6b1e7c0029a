"""Which boxes of a global tensor this rank holds, and the local memory of each.

Handles plain tensors, DTensors (Shard, Replicate and strided placements on meshes of any number
of dimensions, uneven and empty shards), ``ShardedTensor`` and DCP's checkpointable protocol. A
strided placement can scatter a local shard over the global tensor: it becomes several pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_pipeline.core.errors import StateError, UnsupportedLeafError
from dcp_pipeline.types.dcp import MetadataIndex
from dcp_pipeline.types.dtypes import dtype_name
from dcp_pipeline.types.entries import Piece

__all__ = ["ShardedValue", "pieces_of"]

Runs = list[tuple[int, int]]
"""Ranges ``(start, length)`` of one dimension, in the order of the local tensor."""


@dataclass(slots=True)
class ShardedValue:
    """A tensor as one rank sees it.

    Attributes:
        dtype: name of the element type.
        shape: global shape.
        pieces: boxes with at least one element.
        may_repeat: whether other ranks may hold the same boxes.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    may_repeat: bool


def pieces_of(value: Any) -> ShardedValue:
    """Take a tensor-like value apart; nothing is copied.

    Raises:
        UnsupportedLeafError: a layout, dtype, placement or tensor class that cannot be stored.
        StateError: a DTensor whose local tensor is not what its placements say.
    """
    dtype = dtype_name(value.dtype)
    if dtype is None:
        raise UnsupportedLeafError(f"a tensor of dtype {value.dtype}")
    shape = tuple(value.shape)
    if type(value) is torch.Tensor:
        return ShardedValue(dtype, shape, _of_plain(value, (0,) * len(shape)), True)
    if isinstance(value, DTensor):
        pieces = tuple(_of_dtensor(value, shape))
        return ShardedValue(dtype, shape, pieces, _may_repeat(value))
    if isinstance(value, ShardedTensor):
        return ShardedValue(dtype, shape, tuple(_of_sharded(value)), False)
    if hasattr(value, "__create_chunk_list__"):
        return ShardedValue(dtype, shape, tuple(_of_protocol(value)), True)
    return ShardedValue(dtype, shape, _of_plain(value, (0,) * len(shape)), True)


def _of_plain(tensor: torch.Tensor, offsets: tuple[int, ...]) -> tuple[Piece, ...]:
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or is_functorch_wrapped_tensor(tensor)
    ):
        _refuse_unstorable(tensor)
    elif tensor.is_quantized:
        raise UnsupportedLeafError("a quantized tensor; store int_repr() and its scales")
    if not tensor.numel():
        return ()
    return (Piece(offsets, tuple(tensor.shape), tensor.detach()),)


def _refuse_unstorable(tensor: torch.Tensor) -> None:
    if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
        raise UnsupportedLeafError(f"a {type(tensor).__name__} without values of its own")
    if tensor.layout is not torch.strided:
        raise UnsupportedLeafError(
            f"a tensor of layout {tensor.layout}; store its parts or to_dense()"
        )
    if tensor.is_quantized:
        raise UnsupportedLeafError("a quantized tensor; store int_repr() and its scales")
    if tensor.is_nested:
        raise UnsupportedLeafError("a nested tensor; store values() and offsets()")
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedLeafError(
            f"a tensor of class {type(tensor).__name__}; give it DCP's protocol"
            " (__create_chunk_list__, __get_tensor_shard__) or store its inner tensors"
        )


def _of_dtensor(value: DTensor, shape: tuple[int, ...]) -> Iterator[Piece]:
    placements, mesh = value.placements, value.device_mesh
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedLeafError(f"a DTensor with placements {placements}: reduce Partial first")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return
    local = _local_of(value)
    if hasattr(local, "__create_chunk_list__"):
        yield from _of_protocol(value)
        return
    runs = _runs(shape, mesh.shape, coordinate, placements)
    expected = tuple(sum(length for _, length in dimension) for dimension in runs)
    if tuple(local.shape) != expected:
        raise StateError(
            f"a DTensor of shape {list(shape)} with placements {placements} on mesh"
            f" {tuple(mesh.shape)} should hold {list(expected)} at {coordinate},"
            f" its local tensor is {list(local.shape)}"
        )
    if local.numel() == 0:
        return
    if all(len(dimension) == 1 for dimension in runs) or not shape:
        yield from _of_plain(local, tuple(dimension[0][0] for dimension in runs))
        return
    located = [
        list(zip(dimension, itertools.accumulate([0, *(n for _, n in dimension)]), strict=False))
        for dimension in runs
    ]
    for box in itertools.product(*located):
        view = local
        for dimension, ((_, length), begin) in enumerate(box):
            view = view.narrow(dimension, begin, length)
        yield from _of_plain(view, tuple(start for (start, _), _ in box))


def _local_of(value: DTensor) -> torch.Tensor:
    local = value._local_tensor
    wait = getattr(local, "wait", None)
    return wait() if wait is not None else local


def _runs(
    shape: tuple[int, ...],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
) -> list[Runs]:
    """The ranges of each dimension that lie at ``coordinate``, placements applied left to right."""
    runs: list[Runs] = [[(0, extent)] for extent in shape]
    for parts, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, (Shard, _StridedShard)):
            raise UnsupportedLeafError(f"a DTensor with placement {placement}")
        dimension = placement.dim
        if isinstance(placement, _StridedShard):
            strides = int(placement.split_factor)
            held = runs[dimension]
            runs[dimension] = _merge(
                run
                for part in range(strides)
                for run in _chunk(_chunk(held, strides, part), parts, position)
            )
        else:
            runs[dimension] = _chunk(runs[dimension], parts, position)
    return runs


def _chunk(runs: Runs, parts: int, index: int) -> Runs:
    """The ``index``-th of ``parts`` chunks of ``runs``, sized as ``torch.chunk`` does."""
    total = sum(length for _, length in runs)
    size = -(-total // parts)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    result, passed = [], 0
    for start, length in runs:
        low, high = max(begin - passed, 0), min(end - passed, length)
        if low < high:
            result.append((start + low, high - low))
        passed += length
    return result


def _merge(runs: Iterator[tuple[int, int]]) -> Runs:
    merged: Runs = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return merged


def _may_repeat(value: DTensor) -> bool:
    if any(isinstance(placement, Replicate) for placement in value.placements):
        return True
    return not dist.is_initialized() or value.device_mesh.size() != dist.get_world_size()


def _of_sharded(value: ShardedTensor) -> Iterator[Piece]:
    for shard in value.local_shards():
        yield from _inside(shard.tensor, tuple(shard.metadata.shard_offsets))


def _inside(tensor: Any, offsets: tuple[int, ...]) -> Iterator[Piece]:
    """Pieces of a shard, which may be sharded itself (FSDP1 over tensor parallelism)."""
    if isinstance(tensor, (DTensor, ShardedTensor)):
        for piece in pieces_of(tensor).pieces:
            moved = tuple(a + b for a, b in zip(offsets, piece.offsets, strict=True))
            yield Piece(moved, piece.sizes, piece.data)
    else:
        yield from _of_plain(tensor, offsets)


def _of_protocol(value: Any) -> Iterator[Piece]:
    for position, chunk in enumerate(value.__create_chunk_list__()):
        if 0 in chunk.sizes:
            continue
        index = MetadataIndex("", chunk.offsets, position)
        data = value.__get_tensor_shard__(index)
        if tuple(data.shape) != tuple(chunk.sizes):
            raise StateError(
                f"{type(value).__name__} announces a chunk of {list(chunk.sizes)} at"
                f" {list(chunk.offsets)} and gives {list(data.shape)}"
            )
        yield from _of_plain(data, tuple(chunk.offsets))
