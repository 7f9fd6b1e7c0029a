"""The tables of all ranks over one list of keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dcp_pipeline.core.errors import ShapeConflictError, list_some
from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.path import Path, assign_names, dotted
from dcp_pipeline.core.table import ChunkTable, KeySpec, concatenate

__all__ = ["MergedTables", "merge_tables"]


@dataclass(frozen=True)
class MergedTables:
    """Rows of all ranks, rank after rank.

    Attributes:
        names: stored name of each key.
        table: the rows; ``owner`` is the rank that holds them. Rows of aliases are left out.
        row: ``[n]`` the row's place in its rank's own table.
        keys: for each rank, the index of each of its keys.
        is_alias: ``[keys]`` whether a key shares another's storage on every rank that has it.
    """

    names: tuple[str, ...]
    table: ChunkTable
    row: Column
    keys: tuple[Column, ...]
    is_alias: np.ndarray[tuple[int], np.dtype[np.bool_]]


def merge_tables(tables: list[ChunkTable]) -> MergedTables:
    """Bring the tables of all ranks, in rank order, over one list of keys.

    Raises:
        ShapeConflictError: ranks give a key different shapes, dtypes or kinds.
    """
    union = _Union()
    # Ranks of a sharded job hold the same keys; their decoded tuples are one object.
    by_keys: dict[int, Column] = {}
    keys = []
    for rank, table in enumerate(tables):
        if id(table.keys) not in by_keys:
            by_keys[id(table.keys)] = union.add(rank, table.keys)
        keys.append(by_keys[id(table.keys)])
    union.raise_conflicts()
    specs = union.specs()
    is_alias = np.asarray([spec.alias >= 0 for spec in specs], bool)
    parts = [
        replace(table, key=keys[rank][table.key], owner=np.full(len(table), rank, np.int64))
        for rank, table in enumerate(tables)
    ]
    table = concatenate(parts, specs)
    row = np.concatenate([np.arange(len(part)) for part in parts]) if parts else table.key
    if is_alias.any():
        kept = ~is_alias[table.key]
        table, row = table.take(kept), row[kept]
    names = tuple(assign_names([spec.path for spec in specs]))
    return MergedTables(names, table, row, tuple(keys), is_alias)


class _Union:
    """Keys of all ranks, the first rank's order first."""

    def __init__(self) -> None:
        self._index: dict[Path, int] = {}
        self._specs: list[KeySpec] = []
        self._ranks: list[int] = []
        self._aliases: list[set[int]] = []
        self._conflicts: list[str] = []

    def add(self, rank: int, keys: tuple[KeySpec, ...]) -> Column:
        """Add one rank's keys; where each of them is in the union."""
        positions = np.empty(len(keys), np.int64)
        for local, spec in enumerate(keys):
            known = self._index.setdefault(spec.path, len(self._specs))
            positions[local] = known
            if known == len(self._specs):
                self._specs.append(spec)
                self._ranks.append(rank)
                self._aliases.append(set())
            elif not _alike(self._specs[known], spec):
                self._conflicts.append(
                    f"{dotted(spec.path)!r} is {_describe(self._specs[known])} on rank"
                    f" {self._ranks[known]} and {_describe(spec)} on rank {rank}"
                )
            self._aliases[known].add(int(positions[spec.alias]) if spec.alias >= 0 else -1)
        return positions

    def raise_conflicts(self) -> None:
        """Raise what ranks disagree about.

        Raises:
            ShapeConflictError: a key differs, or holds something on one rank and keys on another.
        """
        for path in self._index:
            for depth in range(1, len(path)):
                above = self._index.get(path[:depth])
                if above is not None:
                    self._conflicts.append(
                        f"{dotted(path[:depth])!r} is {_describe(self._specs[above])} on rank"
                        f" {self._ranks[above]} and holds {dotted(path)!r} on rank"
                        f" {self._ranks[self._index[path]]}"
                    )
        if self._conflicts:
            raise ShapeConflictError(
                f"ranks disagree about {len(self._conflicts)} keys: {list_some(self._conflicts)}."
                " A key is one tensor for all ranks: use a DTensor for shards, and RankLocal for"
                " what each rank has of its own"
            )

    def specs(self) -> list[KeySpec]:
        """The union; a key is an alias only where every rank that has it says the same."""
        specs = []
        for spec, targets in zip(self._specs, self._aliases, strict=True):
            alias = next(iter(targets)) if len(targets) == 1 else -1
            specs.append(spec if spec.alias == alias else replace(spec, alias=alias))
        return specs


def _alike(one: KeySpec, other: KeySpec) -> bool:
    return (one.kind, one.dtype, one.shape) == (other.kind, other.dtype, other.shape)


def _describe(spec: KeySpec) -> str:
    if spec.dtype is None:
        return f"a {spec.kind}"
    return f"{spec.dtype} {list(spec.shape)}"
