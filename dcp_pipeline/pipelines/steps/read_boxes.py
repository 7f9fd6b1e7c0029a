"""From boxes of tensors to ranges of files: what has to be read for a target, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np
import torch

from dcp_pipeline.core.errors import CorruptCheckpointError, DtypeMismatchError
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.pipelines.steps.read_items import Located
from dcp_pipeline.state.targets import TensorTarget
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.memory import bytes_of, is_plain_memory

__all__ = ["CastCounts", "Destination", "box_reads", "item_reads"]

_SLAB_BYTES = 2 << 20
_WITHOUT_INFINITY = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)

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


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that a box of a stored tensor is read into.

    Attributes:
        name: the stored key, for errors.
        dtype: of the stored elements.
        view: tensor of the box's shape.
        on_cast: called with the number of elements that did not fit, where ``view`` is of another
            dtype; ``None`` where it is of the same.
        keep: called with the name and the memory before that is overwritten.
    """

    name: str
    dtype: torch.dtype
    view: torch.Tensor
    on_cast: Callable[[int], None] | None = None
    keep: Callable[[str, torch.Tensor], None] | None = None

    def read_direct(self, offset: int, length: int) -> Read:
        """A range of a file that goes straight into the memory."""
        return Read(offset, length, self.name, target=bytes_of(self.view), before=self._before())

    def read_through(self, offset: int, length: int, deliver: Callable[[memoryview], None]) -> Read:
        """A range of a file that ``deliver`` brings into the memory."""
        return Read(offset, length, self.name, deliver=deliver, before=self._before())

    def _before(self) -> Callable[[], None] | None:
        return None if self.keep is None else partial(self.keep, self.name, self.view)

    def narrow(self, dimension: int, start: int, count: int) -> Destination:
        """A part of it."""
        return replace(self, view=self.view.narrow(dimension, start, count))

    def fill(self, stored: torch.Tensor) -> None:
        """Copy elements of the stored dtype into the memory."""
        with torch.no_grad():
            if self.on_cast is not None:
                self.on_cast(_cast_into(self.view, stored))
            elif self.dtype.itemsize == 1:
                # Not every one-byte dtype has a copy kernel; their bytes do.
                self.view.view(torch.uint8).copy_(stored.view(torch.uint8))
            else:
                self.view.copy_(stored)


def box_reads(
    located: Located,
    rows: range,
    target: TensorTarget,
    casts: CastCounts,
    keep: Callable[[str, torch.Tensor], None] | None = None,
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for everything that the pieces of a target need of the chunks ``rows``.

    Args:
        keep: called with the name and the memory before that is overwritten.

    Raises:
        CorruptCheckpointError: the chunks do not cover a piece.
    """
    table = located.table
    width = len(table.keys[target.key].shape)
    chunks = _chunks(table, rows, width)
    dtype = DTYPES[target.dtype]
    on_cast = partial(casts.add, target) if target.target_dtype is not None else None
    keep = None if target.is_fresh else keep
    for piece in target.pieces:
        covered = 0
        wanted = (piece.offsets, piece.sizes)
        for row, chunk in _meeting(chunks, wanted):
            (low, extent), view = wanted, piece.data.detach()
            if chunk != wanted:
                low, extent = _common(chunk, wanted)
                for dimension, (at, count) in enumerate(zip(low, extent, strict=True)):
                    if count != piece.sizes[dimension]:
                        view = view.narrow(dimension, at - piece.offsets[dimension], count)
            covered += prod(extent)
            inside = tuple(a - b for a, b in zip(low, chunk[0], strict=True))
            place = rows.start + row
            destination = Destination(target.name, dtype, view, on_cast, keep)
            file = int(table.file[place])
            for read in item_reads(located, place, chunk[1], inside, extent, destination):
                yield file, read
        if covered != prod(piece.sizes):
            raise CorruptCheckpointError(
                f"the chunks of {target.name} hold {covered} of the {prod(piece.sizes)} elements at"
                f" offsets {list(piece.offsets)} sizes {list(piece.sizes)}"
            )


def _chunks(table: ChunkTable, rows: range, width: int) -> list[Box]:
    offsets = table.offsets[rows.start : rows.stop, :width].tolist()
    sizes = table.sizes[rows.start : rows.stop, :width].tolist()
    return [(tuple(o), tuple(s)) for o, s in zip(offsets, sizes, strict=True)]


def _meeting(chunks: list[Box], wanted: Box) -> Iterable[tuple[int, Box]]:
    """The chunks that have an element in common with ``wanted``, and their numbers."""
    if len(chunks) == 1:
        return [(0, chunks[0])]
    low, high = wanted[0], tuple(a + b for a, b in zip(*wanted, strict=True))
    return [
        (number, chunk)
        for number, chunk in enumerate(chunks)
        if all(
            begin < end and begin + extent > start
            for begin, extent, start, end in zip(*chunk, low, high, strict=True)
        )
    ]


def _common(one: Box, other: Box) -> Box:
    """The part that two boxes share."""
    low = tuple(map(max, one[0], other[0]))
    extent = tuple(min(a + b, c + d) - e for a, b, c, d, e in zip(*one, *other, low, strict=True))
    return low, extent


def item_reads(
    located: Located,
    row: int,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Destination,
) -> Iterator[Read]:
    """Reads for the box ``begin``, ``extent`` within the chunk of one row, of ``sizes``."""
    table = located.table
    base = int(table.offset[row]) + int(table.payload[row])
    stored = located.strided.get(row)
    if stored is None:
        if extent == sizes and destination.on_cast is None and is_plain_memory(destination.view):
            yield destination.read_direct(base, prod(sizes) * destination.dtype.itemsize)
        else:
            yield from _dense_reads(base, sizes, begin, extent, destination)
        return

    def deliver(data: memoryview) -> None:
        elements = torch.frombuffer(bytearray(data), dtype=destination.dtype)
        tensor = elements.as_strided(stored.sizes, stored.strides, stored.storage_offset)
        for dimension, (start, count) in enumerate(zip(begin, extent, strict=True)):
            tensor = tensor.narrow(dimension, start, count)
        destination.fill(tensor)

    yield destination.read_through(base, stored.payload_bytes, deliver)


def _dense_reads(
    base: int,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Destination,
) -> Iterator[Read]:
    """Reads for a box of a chunk whose elements are stored in row-major order."""
    dtype, view = destination.dtype, destination.view
    strides = _strides(sizes)
    first = sum(a * b for a, b in zip(begin, strides, strict=True))
    last = first + sum((a - 1) * b for a, b in zip(extent, strides, strict=True))
    offset = base + first * dtype.itemsize
    length = (last - first + 1) * dtype.itemsize
    is_dense = last - first + 1 == prod(extent)
    if is_dense and destination.on_cast is None and is_plain_memory(view):
        yield destination.read_direct(offset, length)
        return
    dimension = next((d for d, count in enumerate(extent) if count > 1), None)
    if length <= _SLAB_BYTES or dimension is None:
        deliver = partial(_deliver, destination, extent, strides)
        yield destination.read_through(offset, length, deliver)
        return
    span = max(1, length // extent[dimension])
    step = max(1, min(_SLAB_BYTES // span, extent[dimension] - 1))
    for start in range(0, extent[dimension], step):
        count = min(step, extent[dimension] - start)
        yield from _dense_reads(
            base,
            sizes,
            _changed(begin, dimension, begin[dimension] + start),
            _changed(extent, dimension, count),
            destination.narrow(dimension, start, count),
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
    destination: Destination, extent: tuple[int, ...], strides: tuple[int, ...], data: memoryview
) -> None:
    """Copy a box out of the bytes that span it."""
    nbytes = destination.dtype.itemsize
    raw = np.frombuffer(data, f"V{nbytes}")
    steps = [stride * nbytes for stride in strides]
    dense = bytearray(np.lib.stride_tricks.as_strided(raw, extent, steps).tobytes())
    destination.fill(torch.frombuffer(dense, dtype=destination.dtype).view(extent))


def _cast_into(view: torch.Tensor, stored: torch.Tensor) -> int:
    """Convert ``stored`` into ``view``; how many elements do not fit."""
    if stored.is_complex() and not view.is_complex():
        lost = int((torch.view_as_real(stored)[..., 1] != 0).sum())
        view.copy_(torch.view_as_real(stored)[..., 0])
        return lost
    view.copy_(stored)
    given = view.to(stored.device)
    if given.dtype in _WITHOUT_INFINITY:
        return _saturated(stored, given)
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


def _saturated(stored: torch.Tensor, given: torch.Tensor) -> int:
    """Elements that a dtype without infinity has replaced by its largest, or by no number."""
    wide = stored.to(torch.float64)
    limit = torch.finfo(given.dtype)
    outside = (wide.abs() > limit.max) | (given.to(torch.float64).isnan())
    if given.dtype is torch.float8_e8m0fnu:
        outside |= wide < 0
    return int((outside & ~wide.isnan()).sum())


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not (values.dtype.is_floating_point or values.is_complex()):
        return torch.ones(values.shape, dtype=torch.bool, device="cpu")
    wide = values if values.is_complex() else values.to(torch.float64)
    return wide.isfinite()
