"""Reads of tensors that are stored as codes and scales: shard by shard, in slabs, as numbers.

A box of the result needs a box of the codes and the scales that cover it. Scales are read first,
all of a load, which are a sixteenth of the codes at most. A slab of codes that comes before its
scales are there, as it can where ranks pass on what they have read, waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from dcp_pipeline.core.errors import DtypeMismatchError
from dcp_pipeline.core.quantized import Quantized
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.formats.dequantize import dequantize, scale_box
from dcp_pipeline.pipelines.steps.destinations import Destination, dense_reads
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["quantized_reads"]

_PART_CODES = 1 << 18


def quantized_reads(
    table: ChunkTable,
    row: int,
    quantized: Quantized,
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Destination,
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for the box ``begin``, ``extent`` of the result; ``row`` has the codes.

    Args:
        destination: takes elements of the result's dtype.
    """
    shape = table.keys[table.key[row]].shape
    per_code = quantized.per_code
    first, end = begin[-1] // per_code, -(-(begin[-1] + extent[-1]) // per_code)
    codes_begin, codes_extent = (*begin[:-1], first), (*extent[:-1], end - first)
    low, count = scale_box(quantized, codes_begin, codes_extent)
    scales = _Scales(low, torch.empty(count, dtype=DTYPES[quantized.scales], device="cpu"))
    sink = _ScalesSink(destination.name, scales, scales.values)
    for read in dense_reads(quantized.offset, quantized.scales_shape(shape), low, count, sink):
        yield quantized.file, read
    codes = _CodesSink(quantized, scales, codes_begin, codes_extent, begin, extent, destination)
    place = int(table.offset[row]) + int(table.payload[row])
    for read in dense_reads(place, quantized.codes_shape(shape), codes_begin, codes_extent, codes):
        yield int(table.file[row]), read


class _Scales:
    """The scales of one box, and what waits until they have come.

    Attributes:
        begin: where they start in the tensor of all scales.
        values: their memory.
    """

    def __init__(self, begin: tuple[int, ...], values: torch.Tensor) -> None:
        self.begin = begin
        self.values = values
        self._left = values.numel()
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def arrived(self, count: int) -> None:
        """Note that ``count`` scales are in their place."""
        with self._lock:
            self._left -= count
            if self._left:
                return
            waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    def when_there(self, action: Callable[[torch.Tensor], None], codes: torch.Tensor) -> None:
        """Do it with the codes now, or with a copy of them when the last scale has come."""
        with self._lock:
            if self._left:
                # Their memory is the reader's, and holds something else by then.
                kept = codes.view(torch.uint8).clone().view(codes.dtype)
                self._waiting.append(partial(action, kept))
                return
        action(codes)


@dataclass(frozen=True, slots=True)
class _ScalesSink:
    """Takes scales."""

    name: str
    scales: _Scales
    view: torch.Tensor
    takes_bytes: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    def read_direct(self, offset: int, length: int) -> Read:
        raise AssertionError("somebody waits for them")

    def read_through(self, offset: int, length: int, deliver: Callable[[memoryview], None]) -> Read:
        return Read(offset, length, self.name, deliver=deliver, is_early=True)

    def narrow(self, dimension: int, start: int, count: int) -> _ScalesSink:
        return replace(self, view=self.view.narrow(dimension, start, count))

    def fill(self, stored: torch.Tensor) -> None:
        if stored.element_size() == 1:  # not every such dtype has a copy kernel
            self.view.view(torch.uint8).copy_(stored.view(torch.uint8))
        else:
            self.view.copy_(stored)
        self.scales.arrived(stored.numel())


@dataclass(frozen=True, slots=True)
class _CodesSink:
    """Takes the codes ``begin``, ``extent`` and fills their part of the box of the result."""

    quantized: Quantized
    scales: _Scales
    begin: tuple[int, ...]
    extent: tuple[int, ...]
    wanted_begin: tuple[int, ...]
    wanted_extent: tuple[int, ...]
    destination: Destination
    takes_bytes: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.quantized.codes]

    def read_direct(self, offset: int, length: int) -> Read:
        raise AssertionError("codes are not what goes into the memory")

    def read_through(self, offset: int, length: int, deliver: Callable[[memoryview], None]) -> Read:
        part, _ = self._part()
        return part.read_through(offset, length, deliver)

    def narrow(self, dimension: int, start: int, count: int) -> _CodesSink:
        begin, extent = list(self.begin), list(self.extent)
        begin[dimension] += start
        extent[dimension] = count
        return replace(self, begin=tuple(begin), extent=tuple(extent))

    def _part(self) -> tuple[Destination, tuple[int, int]]:
        """Where these codes go, and which of their elements in the last dimension are wanted."""
        part, last = self.destination, len(self.begin) - 1
        cut = (0, 0)
        for dimension, (at, count) in enumerate(zip(self.begin, self.extent, strict=True)):
            per_code = self.quantized.per_code if dimension == last else 1
            wanted = self.wanted_begin[dimension]
            low = max(at * per_code, wanted)
            high = min((at + count) * per_code, wanted + self.wanted_extent[dimension])
            if high - low != self.wanted_extent[dimension]:
                part = part.narrow(dimension, low - wanted, high - low)
            cut = (low - at * per_code, high - low)
        return part, cut

    def fill(self, stored: torch.Tensor) -> None:
        self.scales.when_there(self._put_parts, stored)

    def _put_parts(self, codes: torch.Tensor) -> None:
        """Part by part, so that what is needed meanwhile is small, and stays in the cache."""
        axis = next((axis for axis, extent in enumerate(self.extent) if extent > 1), None)
        if codes.numel() <= _PART_CODES or axis is None:
            self._put(codes)
            return
        extent = self.extent[axis]
        step = max(1, min(extent * _PART_CODES // codes.numel(), extent - 1))
        for start in range(0, extent, step):
            count = min(step, extent - start)
            self.narrow(axis, start, count)._put_parts(codes.narrow(axis, start, count))

    def _put(self, codes: torch.Tensor) -> None:
        low, count = scale_box(self.quantized, self.begin, self.extent)
        scales = self.scales.values
        for dimension, (at, extent) in enumerate(zip(low, count, strict=True)):
            scales = scales.narrow(dimension, at - self.scales.begin[dimension], extent)
        numbers = dequantize(self.quantized, codes, scales, self.begin)
        part, (start, length) = self._part()
        numbers = numbers.narrow(-1, start, length)
        result = numbers.to(part.dtype)
        # The largest is no number either where one is none: mostly there is nothing to count.
        if part.dtype != numbers.dtype and not result.abs().amax().isfinite():
            lost = int((result.isinf() & numbers.isfinite()).sum())
            if lost:
                raise DtypeMismatchError(
                    f"elements of {part.name}, {lost} of them in one part of it, do not fit"
                    f" {part.dtype} once they are dequantized; choose layout.dequantize=float32"
                )
        part.fill(result)
