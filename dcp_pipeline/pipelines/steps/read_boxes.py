"""From boxes of tensors to ranges of files: what has to be read for a target, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from dcp_pipeline.core.errors import CorruptCheckpointError, DtypeMismatchError
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.state.targets import TensorTarget
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Piece
from dcp_pipeline.types.memory import bytes_of, is_plain_memory

__all__ = ["CastCounts", "box_reads"]

_SLAB_BYTES = 2 << 20

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Begin and extent per dimension."""


class CastCounts:
    """How many elements did not fit, by target; filled from several threads."""

    def __init__(self) -> None:
        self._lost: dict[int, list[int]] = {}

    def add(self, target: TensorTarget, lost: int) -> None:
        """Note ``lost`` elements of one part of a target."""
        self._lost.setdefault(id(target), []).append(lost)

    def count(self, target: TensorTarget) -> int:
        """Elements of a target that did not fit."""
        return sum(self._lost.get(id(target), ()))

    def overflows(self, targets: Iterable[TensorTarget]) -> Iterator[DtypeMismatchError]:
        """Errors for targets where an overflow is one."""
        for target in targets:
            if target.fails_on_overflow and self.count(target):
                change = (target.name, target.dtype, target.target_dtype)
                yield DtypeMismatchError(
                    f"{self.count(target)} elements of {target.name} do not fit"
                    f" {target.target_dtype}, to which the declared cast converts {target.dtype}",
                    dtypes=[change],
                )


def box_reads(
    table: ChunkTable, rows: Sequence[int], target: TensorTarget, casts: CastCounts
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for everything that the pieces of a target need of the chunks ``rows``.

    Raises:
        CorruptCheckpointError: the chunks do not cover a piece.
    """
    width = len(table.keys[target.key].shape)
    begin, end = (rows[0], rows[-1] + 1) if rows else (0, 0)
    offsets = table.offsets[begin:end, :width]
    sizes = table.sizes[begin:end, :width]
    for piece in target.pieces:
        covered = 0
        for row in _meeting(offsets, sizes, piece):
            chunk = (tuple(offsets[row].tolist()), tuple(sizes[row].tolist()))
            low = tuple(map(max, chunk[0], piece.offsets))
            extent = tuple(
                min(a + b, c + d) - e
                for a, b, c, d, e in zip(*chunk, piece.offsets, piece.sizes, low, strict=True)
            )
            covered += prod(extent)
            place = begin + row
            base = int(table.offset[place] + table.payload[place])
            yield from (
                (int(table.file[place]), read)
                for read in _chunk_reads(base, chunk, (low, extent), piece, target, casts)
            )
        if covered != prod(piece.sizes):
            raise CorruptCheckpointError(
                f"the chunks of {target.name} hold {covered} of the {prod(piece.sizes)} elements at"
                f" offsets {list(piece.offsets)} sizes {list(piece.sizes)}"
            )


def _meeting(offsets: Any, sizes: Any, piece: Piece) -> Sequence[int]:
    if len(offsets) == 1:
        return (0,)
    low = np.asarray(piece.offsets, np.int64)
    high = low + np.asarray(piece.sizes, np.int64)
    meets = ((offsets < high) & (offsets + sizes > low)).all(axis=1)
    return [int(row) for row in np.flatnonzero(meets)]


def _chunk_reads(
    base: int, chunk: Box, box: Box, piece: Piece, target: TensorTarget, casts: CastCounts
) -> Iterator[Read]:
    """Reads for ``box``, a part of both the stored ``chunk`` and the ``piece``."""
    low, extent = box
    view = piece.data
    for dimension, (at, count) in enumerate(zip(low, extent, strict=True)):
        if count != piece.sizes[dimension]:
            view = view.narrow(dimension, at - piece.offsets[dimension], count)
    inner = tuple(a - b for a, b in zip(low, chunk[0], strict=True))
    yield from _reads(base, chunk[1], inner, extent, view.detach(), target, casts)


def _reads(
    base: int,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    view: torch.Tensor,
    target: TensorTarget,
    casts: CastCounts,
) -> Iterator[Read]:
    """Reads for the box ``begin``, ``extent`` of a chunk of ``sizes`` into ``view``."""
    dtype = DTYPES[target.dtype]
    strides = _strides(sizes)
    first = sum(a * b for a, b in zip(begin, strides, strict=True))
    last = first + sum((a - 1) * b for a, b in zip(extent, strides, strict=True))
    offset = base + first * dtype.itemsize
    length = (last - first + 1) * dtype.itemsize
    is_dense = last - first + 1 == prod(extent)
    if is_dense and target.target_dtype is None and is_plain_memory(view):
        yield Read(offset, length, target.name, target=bytes_of(view))
        return
    splittable = [d for d, count in enumerate(extent) if count > 1]
    if length <= _SLAB_BYTES or not splittable:
        deliver = partial(_deliver, view, extent, strides, target, casts)
        yield Read(offset, length, target.name, deliver=deliver)
        return
    dimension = splittable[0]
    span = max(1, length // extent[dimension])
    step = max(1, min(_SLAB_BYTES // span, extent[dimension] - 1))
    for start in range(0, extent[dimension], step):
        count = min(step, extent[dimension] - start)
        yield from _reads(
            base,
            sizes,
            _changed(begin, dimension, begin[dimension] + start),
            _changed(extent, dimension, count),
            view.narrow(dimension, start, count),
            target,
            casts,
        )


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(sizes):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _changed(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _deliver(
    view: torch.Tensor,
    extent: tuple[int, ...],
    strides: tuple[int, ...],
    target: TensorTarget,
    casts: CastCounts,
    data: memoryview,
) -> None:
    """Copy a box out of the bytes that span it."""
    dtype = DTYPES[target.dtype]
    raw = np.frombuffer(data, f"V{dtype.itemsize}")
    steps = [stride * dtype.itemsize for stride in strides]
    dense = np.ascontiguousarray(np.lib.stride_tricks.as_strided(raw, extent, steps))
    stored = torch.frombuffer(bytearray(dense.tobytes()), dtype=dtype).view(extent)
    with torch.no_grad():
        if target.target_dtype is not None:
            casts.add(target, _cast_into(view, stored))
        elif dtype.itemsize == 1:
            # Not every one-byte dtype has a copy kernel; their bytes do.
            view.view(torch.uint8).copy_(stored.view(torch.uint8))
        else:
            view.copy_(stored)


def _cast_into(view: torch.Tensor, stored: torch.Tensor) -> int:
    """Convert ``stored`` into ``view``; how many elements do not fit."""
    if stored.is_complex() and not view.is_complex():
        lost = int((torch.view_as_real(stored)[..., 1] != 0).sum())
        view.copy_(torch.view_as_real(stored)[..., 0])
        return lost
    view.copy_(stored)
    given = view.to(stored.device)
    if given.dtype.is_floating_point or given.is_complex():
        return int((_finite(stored) & ~_finite(given)).sum())
    if given.dtype is torch.bool:
        return int(((stored != 0) & (stored != 1)).sum())
    if not stored.dtype.is_floating_point:
        return int((given.to(torch.int64) != stored.to(torch.int64)).sum())
    limits = torch.iinfo(given.dtype)
    wide = stored.to(torch.float64)
    fits = wide.isfinite() & (wide > limits.min - 1.0) & (wide < limits.max + 1.0)
    return int((~fits).sum())


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not (values.dtype.is_floating_point or values.is_complex()):
        return torch.ones(values.shape, dtype=torch.bool)
    wide = values if values.is_complex() else values.to(torch.float64)
    return wide.isfinite()
