"""From boxes of tensors to ranges of files: what has to be read for a target, and where it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import prod

import torch

from dcp_pipeline.core.errors import CorruptCheckpointError, DtypeMismatchError
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.pipelines.steps.destinations import Destination, Sink, dense_reads
from dcp_pipeline.pipelines.steps.read_encoded import encoded_reads
from dcp_pipeline.pipelines.steps.read_items import Located
from dcp_pipeline.pipelines.steps.read_quantized import quantized_reads
from dcp_pipeline.state.targets import TensorTarget
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["CastCounts", "box_reads", "row_reads"]

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
    located: Located,
    rows: range,
    target: TensorTarget,
    casts: CastCounts,
    keep: Callable[[str, torch.Tensor], None] | None = None,
    counted: TensorTarget | None = None,
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for everything that the pieces of a target need of the chunks ``rows``.

    Args:
        keep: called with the name and the memory before that is overwritten.
        counted: the target whose casts are counted, where this one is a part of it.

    Raises:
        CorruptCheckpointError: the chunks do not cover a piece.
    """
    table = located.table
    width = len(table.keys[target.key].shape)
    chunks = _chunks(table, rows, width)
    dtype = DTYPES[target.dtype]
    on_cast = partial(casts.add, counted or target) if target.target_dtype is not None else None
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
            yield from row_reads(located, place, inside, extent, destination)
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


def row_reads(
    located: Located,
    row: int,
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Destination,
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for the box ``begin``, ``extent`` within the chunk of one row."""
    table = located.table
    quantized = located.quantized.get(int(table.key[row]))
    if quantized is not None:
        yield from quantized_reads(table, row, quantized, begin, extent, destination)
        return
    file, sizes = int(table.file[row]), table.boxes(row)[1]
    for read in _item_reads(located, row, sizes, begin, extent, destination):
        yield file, read


def _item_reads(
    located: Located,
    row: int,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Sink,
) -> Iterator[Read]:
    """Reads for the box ``begin``, ``extent`` within the chunk of one row, of ``sizes``."""
    table = located.table
    spans = located.encoded.get(row)
    if spans is not None:
        name = f"{located.files[table.file[row]]}, {located.names[table.key[row]]}"
        yield from encoded_reads(spans, sizes, begin, extent, destination, name)
        return
    base = int(table.offset[row]) + int(table.payload[row])
    stored = located.strided.get(row)
    if stored is None:
        if extent == sizes and destination.takes_bytes:
            yield destination.read_direct(base, prod(sizes) * destination.dtype.itemsize)
        else:
            yield from dense_reads(base, sizes, begin, extent, destination)
        return

    def deliver(data: memoryview) -> None:
        elements = torch.frombuffer(bytearray(data), dtype=destination.dtype)
        tensor = elements.as_strided(stored.sizes, stored.strides, stored.storage_offset)
        for dimension, (start, count) in enumerate(zip(begin, extent, strict=True)):
            tensor = tensor.narrow(dimension, start, count)
        destination.fill(tensor)

    yield destination.read_through(base, stored.payload_bytes, deliver)
