"""Proof that the chunks of every tensor cover it exactly once.

Most tensors are cut along one dimension (or not at all): those are proven together, without a
loop over tensors. The rest are proven one by one by counting how often each cell of the grid
spanned by all chunk boundaries is covered.
"""

from __future__ import annotations

import numpy as np

from dcp_pipeline.core.errors import TilingError, list_some
from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.path import assign_names
from dcp_pipeline.core.table import ChunkTable

__all__ = ["check_tiling", "tiling_problems"]

_MAX_CELLS = 1 << 26
_MAX_REPORTED = 10


def check_tiling(table: ChunkTable, skip: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Raise unless the rows of every tensor key tile its global shape.

    Args:
        skip: as in :func:`tiling_problems`.

    Raises:
        TilingError: a gap, an overlap or a chunk out of bounds; the message names key, offsets
            and ranks of the first ten.
    """
    problems = tiling_problems(table, skip)
    if problems:
        raise TilingError(
            "the chunks do not tile the state: " + "; ".join(problems)
            + ". Every element of a tensor must be in exactly one chunk (replicas aside): check"
            " the placements and the shapes that each rank passes"
        )  # fmt: skip


def tiling_problems(
    table: ChunkTable, skip: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> list[str]:
    """What keeps the rows of the tensor keys from tiling their global shapes, the first ten.

    A tensor with no elements needs no rows. Values need exactly one row.

    Args:
        skip: ``[keys]`` keys that need no rows, since they share another's storage.
    """
    shapes = _shapes(table)
    problems = _out_of_bounds(table, shapes)
    if not problems:
        suspects = _not_plainly_tiled(table, shapes)
        order = np.argsort(table.key, kind="stable")
        starts = np.searchsorted(table.key[order], np.arange(len(table.keys) + 1))
        for key in suspects[~skip[suspects]]:
            problems += _examine(table, int(key), order[starts[key] : starts[key + 1]])
            if len(problems) >= _MAX_REPORTED:
                break
    return problems[:_MAX_REPORTED]


def _shapes(table: ChunkTable) -> Column:
    shapes = np.ones((len(table.keys), table.dimensions), np.int64)
    for position, spec in enumerate(table.keys):
        shapes[position, : len(spec.shape)] = spec.shape[: table.dimensions]
    return shapes


def _describe(table: ChunkTable, rows: Column) -> str:
    shown = []
    for row in rows[:4]:
        offsets, sizes = table.boxes(int(row))
        shown.append(f"rank {table.owner[row]} offsets {list(offsets)} sizes {list(sizes)}")
    return list_some(shown, 4)


def _name(table: ChunkTable, key: int) -> str:
    return assign_names([spec.path for spec in table.keys])[key]


def _out_of_bounds(table: ChunkTable, shapes: Column) -> list[str]:
    ends = table.offsets + table.sizes
    bad = ((table.offsets < 0) | (table.sizes < 1) | (ends > shapes[table.key])).any(axis=1)
    rows = np.flatnonzero(bad)[:_MAX_REPORTED]
    return [
        f"{_name(table, int(table.key[row]))} of shape {list(table.keys[table.key[row]].shape)} has"
        f" a chunk out of bounds: {_describe(table, rows[i : i + 1])}"
        for i, row in enumerate(rows)
    ]


def _not_plainly_tiled(table: ChunkTable, shapes: Column) -> Column:
    """Keys that are not proven by being cut along at most one dimension, end to end."""
    count = len(table.keys)
    volumes = np.bincount(table.key, table.sizes.prod(axis=1), count).astype(np.int64)
    plain = volumes == shapes.prod(axis=1) * _has_elements(table)
    if len(table) and table.dimensions:
        partial = table.sizes < shapes[table.key]
        cut = np.zeros((count, table.dimensions), bool)
        np.logical_or.at(cut, table.key, partial)
        plain &= cut.sum(axis=1) <= 1
        along = cut.argmax(axis=1)[table.key]
        rows = np.arange(len(table))
        start, extent = table.offsets[rows, along], table.sizes[rows, along]
        order = np.lexsort([start, table.key])
        first = np.r_[True, np.diff(table.key[order]) != 0]
        previous_end = np.r_[0, (start + extent)[order][:-1]]
        joined = start[order] == np.where(first, 0, previous_end)
        np.logical_and.at(plain, table.key[order], joined)
    return np.flatnonzero(~plain)


def _has_elements(table: ChunkTable) -> Column:
    return np.asarray([0 not in spec.shape for spec in table.keys], np.int64)


def _examine(table: ChunkTable, key: int, rows: Column) -> list[str]:
    """Problems of one key, by coverage of the grid of all its chunk boundaries."""
    spec, name = table.keys[key], _name(table, key)
    if 0 in spec.shape:
        return [f"{name} has no elements but {len(rows)} chunks"] if len(rows) else []
    if not len(rows):
        return [f"{name} of shape {list(spec.shape)} has no chunk on any rank"]
    if spec.dtype is None or not spec.shape:
        return (
            [f"{name} is held {len(rows)} times: {_describe(table, rows)}"] if len(rows) > 1 else []
        )
    dimensions = len(spec.shape)
    low = table.offsets[rows, :dimensions]
    high = low + table.sizes[rows, :dimensions]
    edges = [np.unique(np.r_[0, spec.shape[d], low[:, d], high[:, d]]) for d in range(dimensions)]
    if np.prod([len(e) for e in edges], dtype=float) > _MAX_CELLS:
        return _examine_pairs(table, name, rows, low, high, spec.shape)
    cover = _coverage(edges, low, high)
    problems = []
    for wrong, word in ((cover == 0, "a gap"), (cover > 1, "an overlap")):
        cells = np.argwhere(wrong)
        if len(cells):
            begin = [int(edges[d][cells[0][d]]) for d in range(dimensions)]
            end = [int(edges[d][cells[0][d] + 1]) for d in range(dimensions)]
            inside = ((low <= begin) & (high >= end)).all(axis=1)
            near = rows[inside] if inside.any() else rows
            problems.append(
                f"{name} of shape {list(spec.shape)} has {word} at offsets {begin} sizes"
                f" {[e - b for b, e in zip(begin, end, strict=True)]}"
                f" ({'held by' if inside.any() else 'chunks are'} {_describe(table, near)})"
            )
    return problems


def _coverage(edges: list[Column], low: Column, high: Column) -> Column:
    """How many chunks hold each cell: corner differences, summed up along every dimension."""
    dimensions = len(edges)
    counts = np.zeros([len(e) for e in edges], np.int64)
    at_low = [np.searchsorted(edges[d], low[:, d]) for d in range(dimensions)]
    at_high = [np.searchsorted(edges[d], high[:, d]) for d in range(dimensions)]
    for corner in np.ndindex(*[2] * dimensions):
        index = tuple(at_high[d] if corner[d] else at_low[d] for d in range(dimensions))
        np.add.at(counts, index, 1 - 2 * (sum(corner) % 2))
    for d in range(dimensions):
        counts = counts.cumsum(axis=d)
    return counts[tuple(slice(0, -1) for _ in range(dimensions))]


def _examine_pairs(
    table: ChunkTable, name: str, rows: Column, low: Column, high: Column, shape: tuple[int, ...]
) -> list[str]:
    """Exact check without the grid, for thousands of chunks cut irregularly in many dimensions."""
    for position in range(len(rows)):
        meets = ((low[position] < high) & (low < high[position])).all(axis=1)
        meets[position] = False
        if meets.any():
            pair = np.r_[rows[position : position + 1], rows[meets][:1]]
            return [f"{name} of shape {list(shape)} has an overlap: {_describe(table, pair)}"]
    held, wanted = int((high - low).prod(axis=1).sum()), int(np.prod(shape))
    return [f"{name} of shape {list(shape)} has a gap: {held} of {wanted} elements are held"] * (
        held != wanted
    )
