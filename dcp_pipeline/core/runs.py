"""The raw CRC of a box of a tensor, as a part of the whole tensor's.

A box lies in the whole tensor's bytes as runs at even distances, in up to as many levels as there
are dimensions. Runs that are long are hashed one by one. Short ones that are close to one another
are laid out as they lie in the whole, with zeros between them, which is what linear means; short
ones that are far apart are hashed side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dcp_pipeline.core.crc64 import fold, raw_crc64, raw_crcs, raw_crcs_of_short

__all__ = ["Box", "crcs_of"]

Levels = tuple[tuple[int, int], ...]
"""Counts and distances in bytes, outermost first."""

_SCRATCH = 1 << 18
_ROWS = 1 << 15
# Nanoseconds, of which only the ratios count: a call of the library and a byte of it; laying out at
# all, a run of it and a byte of that; a run that is hashed beside others, and a word of it.
_CALL, _BYTE = 400.0, 0.04
_LAYING_OUT, _RUN, _RUN_BYTE = 15_000.0, 10.0, 0.1
_BESIDE, _WORD = 60.0, 30.0


class Box(NamedTuple):
    """A part of a tensor.

    Attributes:
        shape: of the whole tensor.
        offsets, sizes: where the box starts, and its extent.
        item_size: bytes of an element.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item_size: int


class _Geometry(NamedTuple):
    """Boxes of one size in tensors of one shape.

    Attributes:
        levels: how the runs lie.
        run: bytes of one.
        strides: bytes from one index of each dimension to the next.
        nbytes: of the whole tensor.
    """

    levels: Levels
    run: int
    strides: tuple[int, ...]
    nbytes: int


def crcs_of(box: Box, begin: int, data: memoryview) -> list[tuple[int, int]]:
    """Raw CRCs of bytes of a box, each with the bytes that follow it in the whole tensor.

    Args:
        begin: which of the box's own bytes, row-major, come first.
        data: those and the ones behind them, up to the end of the box at most.

    Returns:
        Raw CRC and trailing bytes; see :func:`dcp_pipeline.core.crc64.shift`.
    """
    shape, offsets, sizes, item_size = box
    geometry = _geometry(shape, sizes, item_size)
    base = 0 if sizes == shape else sum(map(mul, offsets, geometry.strides))
    if not geometry.levels:
        return [(raw_crc64(data), geometry.nbytes - base - begin - len(data))]
    at, found = 0, []
    parts = _whole_parts(geometry.levels, geometry.run, begin, begin + len(data), base)
    for levels, nbytes, start in parts:
        raw = _raw_of(levels, geometry.run, data[at : at + nbytes])
        at += nbytes
        span = _span(levels, geometry.run) if levels else nbytes
        found.append((raw, geometry.nbytes - start - span))
    return found


@lru_cache(maxsize=4096)
def _geometry(shape: tuple[int, ...], sizes: tuple[int, ...], item_size: int) -> _Geometry:
    stride = run = item_size
    levels: list[tuple[int, int]] = []
    strides: list[int] = []
    for extent, size in zip(reversed(shape), reversed(sizes), strict=True):
        strides.append(stride)
        if not levels and run == stride:
            run *= size
        elif size > 1 and levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        elif size > 1:
            levels.append((size, stride))
        stride *= extent
    return _Geometry(tuple(reversed(levels)), run, tuple(reversed(strides)), stride)


def _whole_parts(
    levels: Levels, run: int, begin: int, end: int, base: int
) -> Iterator[tuple[Levels, int, int]]:
    """Bytes of a box as boxes of whole runs, and parts of single runs, in order.

    Yields:
        Levels (none for one run or a part of it), bytes, and where they start in the whole tensor.
    """
    if not levels:
        yield (), end - begin, base + begin
        return
    (_, stride), inner = levels[0], levels[1:]
    nbytes = run * math.prod(count for count, _ in inner)
    first, skipped = divmod(begin, nbytes)
    last, rest = divmod(end, nbytes)
    if first == last:
        yield from _whole_parts(inner, run, skipped, rest, base + first * stride)
        return
    if skipped:
        yield from _whole_parts(inner, run, skipped, nbytes, base + first * stride)
        first += 1
    step = max(1, _ROWS * run // nbytes)
    for at in range(first, last, step):
        count = min(step, last - at)
        part = ((count, stride), *inner) if count > 1 else inner
        yield part, count * nbytes, base + at * stride
    if rest:
        yield from _whole_parts(inner, run, 0, rest, base + last * stride)


def _span(levels: Levels, run: int) -> int:
    """Bytes from the first run to the end of the last."""
    return sum((count - 1) * stride for count, stride in levels) + run


def _raw_of(levels: Levels, run: int, data: memoryview) -> int:
    """The raw CRC of whole runs with zeros between them, from the first to the end of the last."""
    if not levels:
        return raw_crc64(data)
    laid_out = _levels_to_lay_out(levels, run)
    if laid_out is None:
        outer, values = levels, raw_crcs_of_short(data, run)
    elif not laid_out:
        outer, values = levels, raw_crcs(data, run)
    else:
        outer, inner = levels[: len(levels) - laid_out], levels[len(levels) - laid_out :]
        nbytes = run * math.prod(count for count, _ in inner)
        units = [data[at : at + nbytes] for at in range(0, len(data), nbytes)]
        values = np.asarray([_laid_out(inner, run, unit) for unit in units], np.uint64)
    for count, stride in reversed(outer):
        values = fold(values.reshape(-1, count), stride)
    return int(values[0])


@lru_cache(maxsize=4096)
def _levels_to_lay_out(levels: Levels, run: int) -> int | None:
    """How many of the inner levels are hashed with zeros between their runs in one go.

    ``None`` where the runs are best hashed side by side.
    """
    runs = math.prod(count for count, _ in levels)
    best, least = None, runs * (_BESIDE + _WORD * -(-run // 8))
    for inner in range(len(levels) + 1):
        kept = levels[len(levels) - inner :]
        units = math.prod(count for count, _ in levels[: len(levels) - inner])
        cost = units * (_CALL + _BYTE * _span(kept, run))
        if inner:
            cost += units * _LAYING_OUT + runs * (_RUN + _RUN_BYTE * run)
        if cost < least:
            best, least = inner, cost
    return best


def _laid_out(levels: Levels, run: int, data: memoryview) -> int:
    width = math.gcd(8, run, *(stride for _, stride in levels))
    (count, stride), inner = levels[0], levels[1:]
    shape: Sequence[int] = [*(number for number, _ in inner), run // width]
    strides = [stride, *(distance for _, distance in inner), width]
    rows = min(count, max(1, _SCRATCH // stride))
    kind = np.dtype(f"u{width}")
    scratch = np.zeros(rows * stride // width, kind)
    source = np.frombuffer(data, kind).reshape(count, *shape)
    target = as_strided(scratch, (rows, *shape), strides)
    view, raw = memoryview(scratch.data).cast("B"), 0
    for at in range(0, count, rows):
        part = source[at : at + rows]
        target[: len(part)] = part
        is_last = at + rows >= count
        end = (len(part) - 1) * stride + _span(inner, run) if is_last else len(part) * stride
        raw = raw_crc64(view[:end], raw)
    return raw
