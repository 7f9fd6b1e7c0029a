"""Reads of chunks whose bytes are not simply their elements: spans are verified and unpacked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from dcp_pipeline.core.spans import Span
from dcp_pipeline.formats.spans import check_stored, decode_span
from dcp_pipeline.pipelines.steps.destinations import Sink, dense_reads
from dcp_pipeline.storage.reading import Read

__all__ = ["encoded_reads"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Begin and extent per dimension."""


def encoded_reads(
    spans: Sequence[Span],
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    sink: Sink,
    name: str,
) -> Iterator[Read]:
    """Reads for the box ``begin``, ``extent`` of a chunk of ``sizes``; spans beside it stay unread.

    Args:
        name: file and key, for errors.
    """
    width = sink.dtype.itemsize
    if any(span.begin % width or span.size % width for span in spans):
        yield from _joined_reads(spans, sizes, begin, extent, sink, name)
        return
    for span in spans:
        wanted = list(_parts(sizes, span.begin // width, span.end // width, (begin, extent)))
        if not wanted:
            continue
        if span.is_plain and not span.checksum:
            for part in wanted:
                base = span.offset - span.begin
                yield from dense_reads(base, sizes, *part, _narrowed(sink, part, begin))
            continue
        around = _around(wanted)
        memory = _narrowed(sink, around, begin)
        is_whole = len(wanted) == 1 and prod(around[1]) * width == span.size
        if is_whole and span.is_plain and memory.takes_bytes:
            read = memory.read_direct(span.offset, span.stored)
        else:
            fill = partial(_fill, span, name, sizes, wanted, memory, around[0])
            read = memory.read_through(span.offset, span.stored, fill)
        yield _checked(read, span, name)


def _checked(read: Read, span: Span, name: str) -> Read:
    check = partial(_check, span, name)
    return replace(read, check=check, has_checksum=bool(span.checksum))


def _check(span: Span, name: str, data: memoryview) -> None:
    check_stored(span, data, name)
    if not span.is_plain:
        decode_span(span, data, name)


def _fill(
    span: Span,
    name: str,
    sizes: tuple[int, ...],
    parts: Sequence[Box],
    memory: Sink,
    origin: tuple[int, ...],
    data: memoryview,
) -> None:
    """Verify and unpack a span, then put its part of the box into the memory."""
    check_stored(span, data, name)
    elements = _tensor(decode_span(span, data, name), memory.dtype)
    first = span.begin // memory.dtype.itemsize
    for part in parts:
        _narrowed(memory, part, origin).fill(_view(elements, sizes, part, first))


def _tensor(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    # A copy, unless it can be written to: torch warns of memory that cannot.
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)


def _view(elements: torch.Tensor, sizes: tuple[int, ...], part: Box, first: int) -> torch.Tensor:
    """A box of row-major elements of which those before ``first`` are not there."""
    strides = _strides(sizes)
    at = sum(a * b for a, b in zip(part[0], strides, strict=True)) - first
    return elements.as_strided(part[1], strides, at)


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(sizes[dimension + 1 :]) for dimension in range(len(sizes)))


def _narrowed(sink: Sink, part: Box, origin: tuple[int, ...]) -> Sink:
    """The part of the memory that is the box ``part``, where the whole begins at ``origin``."""
    for dimension, (at, start, count) in enumerate(zip(part[0], origin, part[1], strict=True)):
        sink = sink.narrow(dimension, at - start, count)
    return sink


def _around(parts: Sequence[Box]) -> Box:
    """The least box with all of ``parts`` in it."""
    low = tuple(map(min, *(part[0] for part in parts))) if len(parts) > 1 else parts[0][0]
    ends = [tuple(a + b for a, b in zip(*part, strict=True)) for part in parts]
    high = tuple(map(max, *ends)) if len(ends) > 1 else ends[0]
    return low, tuple(b - a for a, b in zip(low, high, strict=True))


def _parts(sizes: tuple[int, ...], first: int, last: int, wanted: Box) -> Iterator[Box]:
    """The boxes that the elements ``first`` to ``last`` and the wanted box have in common."""
    for low, extent in _runs(sizes, first, last):
        begin = tuple(map(max, low, wanted[0]))
        end = tuple(min(a + b, c + d) for a, b, c, d in zip(low, extent, *wanted, strict=True))
        if all(a < b for a, b in zip(begin, end, strict=True)):
            yield begin, tuple(b - a for a, b in zip(begin, end, strict=True))


def _runs(sizes: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """A stretch of row-major elements as boxes: at most two per dimension, and one between."""
    if first >= last:
        return
    if not sizes:
        yield (), ()
        return
    inner, rest = prod(sizes[1:]), sizes[1:]
    start, stop = -(-first // inner), last // inner
    if start > stop:
        # Both ends lie within one row.
        yield from _in_row(stop, rest, first - stop * inner, last - stop * inner)
        return
    if first < start * inner:
        yield from _in_row(start - 1, rest, first - (start - 1) * inner, inner)
    if start < stop:
        yield (start, *(0 for _ in rest)), (stop - start, *rest)
    if stop * inner < last:
        yield from _in_row(stop, rest, 0, last - stop * inner)


def _in_row(row: int, sizes: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    for low, extent in _runs(sizes, first, last):
        yield (row, *low), (1, *extent)


class _Joined:
    """Elements of a chunk that are cut in the middle by spans, until all of them are there."""

    def __init__(self, start: int, end: int, parts: int) -> None:
        self.start = start
        self.data = bytearray(end - start)
        self._left = parts
        self._lock = threading.Lock()

    def put(self, span: Span, elements: memoryview) -> bool:
        """Take a span; whether it was the last."""
        self.data[span.begin - self.start : span.end - self.start] = elements
        with self._lock:
            self._left -= 1
            return not self._left


def _joined_reads(
    spans: Sequence[Span],
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    sink: Sink,
    name: str,
) -> Iterator[Read]:
    """As :func:`encoded_reads`, for spans that cut elements: these are put together first."""
    width, strides = sink.dtype.itemsize, _strides(sizes)
    low = sum(a * b for a, b in zip(begin, strides, strict=True))
    high = low + sum((a - 1) * b for a, b in zip(extent, strides, strict=True)) + 1
    met = [span for span in spans if span.begin < high * width and span.end > low * width]
    joined = _Joined(met[0].begin, met[-1].end, len(met))
    # Elements begin anew behind what the first span has of one.
    skipped = -joined.start % width

    def deliver(span: Span, data: memoryview) -> None:
        check_stored(span, data, name)
        if joined.put(span, decode_span(span, data, name)):
            count = (len(joined.data) - skipped) // width
            elements = torch.frombuffer(joined.data, dtype=sink.dtype, count=count, offset=skipped)
            first = (joined.start + skipped) // width
            sink.fill(_view(elements, sizes, (begin, extent), first))

    for number, span in enumerate(met):
        read = sink.read_through(span.offset, span.stored, partial(deliver, span))
        # What is overwritten is copied once, before the first of them.
        before = read.before if number == 0 else None
        yield _checked(replace(read, before=before), span, name)
