"""Spreads replicated chunks over the ranks that hold them.

The chunks that one set of ranks holds are laid end to end, and that line of bytes is cut into one
stretch per rank, as long as the rank is below the common level. So every rank ends up with about
the same load, and at most one chunk per boundary is split, whatever their number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.table import ChunkTable, concatenate
from dcp_pipeline.planning.replicas import ReplicaGroups

__all__ = ["assign_writers"]


def assign_writers(
    table: ChunkTable, row: Column, groups: ReplicaGroups, world_size: int, split_bytes: int | None
) -> tuple[ChunkTable, Column]:
    """Every box once, with the rank that writes it as owner, sorted by owner.

    Args:
        row: for each row of ``table`` its place in its rank's own table.
        split_bytes: boxes from this size on may be split; ``None`` leaves every box to the lowest
            rank that holds it.

    Returns:
        The table, and for each of its rows the place in the owner's own table.
    """
    if not len(table):
        return table, row
    first = groups.order[groups.start[:-1]]
    shared = np.flatnonzero(groups.sizes > 1)
    if split_bytes is None or not len(shared):
        # Whole tables are large at scale: one copy, in the final order.
        order = np.lexsort([row[first], table.owner[first]])
        return table.take(first[order]), row[first[order]]
    single = first[groups.sizes == 1]
    loads = np.bincount(
        table.owner[single], weights=table.nbytes[single], minlength=world_size
    ).astype(np.int64)
    parts = [(table.take(single), row[single])]
    for members in _by_holders(table, groups, shared):
        parts.append(_spread(table, row, groups, members, loads, split_bytes))
    merged = concatenate([part for part, _ in parts], table.keys)
    return _by_owner(merged, np.concatenate([place for _, place in parts]))


def _by_owner(table: ChunkTable, row: Column) -> tuple[ChunkTable, Column]:
    order = np.lexsort([row, table.owner])
    return table.take(order), row[order]


def _by_holders(table: ChunkTable, groups: ReplicaGroups, shared: Column) -> list[Column]:
    """The shared groups, those with the same set of holders together, the smallest sets first.

    What few ranks hold leaves little choice; what many hold makes up for it afterwards.
    """
    # A random number per rank, summed over the holders: equal sums are equal sets.
    numbers = np.random.default_rng(0).integers(0, 1 << 62, int(table.owner.max()) + 1, np.uint64)
    sums = np.add.reduceat(numbers[table.owner[groups.order]], groups.start[:-1])[shared]
    _, inverse = np.unique(sums, return_inverse=True)
    order = np.lexsort([inverse, groups.sizes[shared]])
    cuts = np.flatnonzero(np.diff(inverse[order])) + 1
    return np.split(shared[order], cuts)


@dataclass(frozen=True)
class _Line:
    """Boxes of one set of holders, laid end to end."""

    begin: Column
    end: Column
    writer_ends: Column


def _spread(
    table: ChunkTable,
    row: Column,
    groups: ReplicaGroups,
    members: Column,
    loads: Column,
    split_bytes: int,
) -> tuple[ChunkTable, Column]:
    """Rows for the boxes of ``members``, all held by the same ranks; adds to ``loads``."""
    count = int(groups.sizes[members[0]])
    rows = groups.order[groups.start[members][:, None] + np.arange(count)]
    holders = table.owner[rows[0]]
    nbytes = table.nbytes[rows[:, 0]]
    end = np.cumsum(nbytes)
    line = _Line(end - nbytes, end, np.cumsum(_capacities(loads[holders], int(end[-1]))))
    middle = (line.begin + line.end) // 2
    writer = np.minimum(np.searchsorted(line.writer_ends, middle, side="right"), count - 1)
    chosen = rows[np.arange(len(rows)), writer]
    pieces, places = table.take(chosen), row[chosen]
    splits = _splits(line, nbytes, split_bytes)
    if splits:
        kept = np.ones(len(rows), bool)
        kept[list(splits)] = False
        extra = [_split(table, row, rows[box], cuts) for box, cuts in splits.items()]
        pieces = concatenate([pieces.take(kept), *[part for part, _ in extra]], table.keys)
        places = np.concatenate([places[kept], *[part for _, part in extra]])
    np.add.at(loads, pieces.owner, pieces.nbytes)
    return pieces, places


def _capacities(loads: Column, total: int) -> Column:
    """How much each rank takes of ``total`` so that all come to one level, as far as they can."""
    order = np.argsort(loads, kind="stable")
    sorted_loads = loads[order]
    for count in range(len(loads), 0, -1):
        level, remainder = divmod(total + int(sorted_loads[:count].sum()), count)
        if level >= sorted_loads[count - 1] or count == 1:
            break
    capacities = np.zeros(len(loads), np.int64)
    taken = level - sorted_loads[:count]
    taken[:remainder] += 1
    capacities[order[:count]] = taken
    return capacities


def _splits(line: _Line, nbytes: Column, split_bytes: int) -> dict[int, list[tuple[int, float]]]:
    """Boxes that a boundary runs through: for each the ``(writer, fraction where it ends)``."""
    inner = line.writer_ends[:-1]
    box = np.searchsorted(line.end, inner, side="right")
    splits: dict[int, list[tuple[int, float]]] = {}
    for writer, (position, cut) in enumerate(zip(box, inner, strict=True)):
        if (
            position < len(nbytes)
            and line.begin[position] < cut
            and nbytes[position] >= split_bytes
        ):
            fraction = (int(cut) - int(line.begin[position])) / int(nbytes[position])
            splits.setdefault(int(position), []).append((writer, fraction))
    for position, cuts in splits.items():
        last = np.searchsorted(line.writer_ends, line.end[position], side="left")
        cuts.append((min(int(last), len(line.writer_ends) - 1), 1.0))
    return splits


def _split(
    table: ChunkTable, row: Column, replicas: Column, cuts: list[tuple[int, float]]
) -> tuple[ChunkTable, Column]:
    """One box cut along its first dimension that has more than one element."""
    sizes = table.sizes[replicas[0]]
    wide = np.flatnonzero(sizes > 1)
    is_value = table.keys[table.key[replicas[0]]].dtype is None
    if is_value or not len(wide):
        chosen = replicas[[cuts[-1][0]]]
        return table.take(chosen), row[chosen]
    dimension = int(wide[0])
    extent = int(sizes[dimension])
    ends = [round(fraction * extent) for _, fraction in cuts]
    begins = [0, *ends[:-1]]
    used = [i for i in range(len(cuts)) if ends[i] > begins[i]]
    chosen = replicas[[cuts[i][0] for i in used]]
    part = table.take(chosen)
    part.offsets[:, dimension] += [begins[i] for i in used]
    part.sizes[:, dimension] = [ends[i] - begins[i] for i in used]
    return part, row[chosen]
