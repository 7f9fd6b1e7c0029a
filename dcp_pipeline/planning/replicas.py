"""Which rows are replicas of one another, and whether they are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_pipeline.core.errors import ReplicaMismatchError, list_some
from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.table import ChunkTable

__all__ = ["ReplicaGroups", "check_replicas_equal", "group_replicas"]


@dataclass(frozen=True)
class ReplicaGroups:
    """Rows of a table grouped by box.

    Attributes:
        order: ``[n]`` rows, those of one group next to each other, by rank within a group.
        start: ``[g + 1]`` where each group begins in ``order``.
    """

    order: Column
    start: Column

    @property
    def sizes(self) -> Column:
        """``[g]`` rows of each group."""
        return np.diff(self.start)


def group_replicas(table: ChunkTable) -> ReplicaGroups:
    """Group the rows of ``table`` that have the same key, offsets and sizes."""
    columns = [*table.sizes.T, *table.offsets.T, table.key]
    order = np.lexsort(columns)
    differs = np.zeros(max(len(table) - 1, 0), bool)
    for column in columns:
        differs |= np.diff(column[order]) != 0
    start = np.r_[0, np.flatnonzero(differs) + 1, len(table)] if len(table) else np.zeros(1, int)
    return ReplicaGroups(order, start.astype(np.int64))


def check_replicas_equal(table: ChunkTable, groups: ReplicaGroups, names: Sequence[str]) -> None:
    """Raise if two replicas with a digest have different ones.

    Raises:
        ReplicaMismatchError: naming every such key and the ranks of each value.
    """
    if not len(table):
        return
    digest = table.digest[groups.order]
    first = np.repeat(_first_digest(digest, groups), groups.sizes)
    differs = (digest != first) & (digest != 0)
    if not differs.any():
        return
    group_of_row = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    problems = []
    for group in np.unique(group_of_row[differs]):
        rows = groups.order[groups.start[group] : groups.start[group + 1]]
        values: dict[int, list[int]] = {}
        for row in rows:
            values.setdefault(int(table.digest[row]), []).append(int(table.owner[row]))
        sides = " and ".join(f"ranks {ranks}" for value, ranks in values.items() if value)
        problems.append(f"{names[table.key[rows[0]]]!r} ({sides} differ)")
    # The groups of torch's nested layout have numbers, which stages of a pipeline share.
    has_groups = any("param_groups." in problem for problem in problems)
    raise ReplicaMismatchError(
        f"{len(problems)} keys hold different values on different ranks: {list_some(problems)}."
        " Only one of them would be kept. Wrap what each rank has of its own in RankLocal,"
        " or set planner.check_replicas=false to keep the lowest rank's"
        + (
            "; optimizers of pipeline stages are told apart by"
            " StateDictOptions(flatten_optimizer_state_dict=True)" * has_groups
        )
    )


def _first_digest(digest: Column, groups: ReplicaGroups) -> Column:
    """The first digest of each group that was taken, 0 where none was."""
    taken = np.flatnonzero(digest)
    position = np.searchsorted(taken, groups.start[:-1])
    candidate = taken[np.minimum(position, max(len(taken) - 1, 0))] if len(taken) else taken
    if not len(taken):
        return np.zeros(len(groups.sizes), np.int64)
    inside = (
        (position < len(taken)) & (candidate < groups.start[1:]) & (candidate >= groups.start[:-1])
    )
    return np.where(inside, digest[candidate], 0)
