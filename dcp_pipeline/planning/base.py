"""Which rank writes what: the interface of a kind of planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.path import dotted
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.types.entries import Entries

__all__ = ["GlobalPlan", "Planner"]


@dataclass(frozen=True)
class GlobalPlan:
    """What all ranks together write.

    Attributes:
        names: stored name of each key of ``table``.
        table: every chunk once, ``owner`` being the rank that writes it; rows sorted by owner.
        row: ``[n]`` for each chunk, the row of its owner's local table that it is a part of.
        keys: for each rank, the index in ``table.keys`` of each key of its local table.
    """

    names: tuple[str, ...]
    table: ChunkTable
    row: Column
    keys: tuple[Column, ...]

    @cached_property
    def bytes_by_rank(self) -> Column:
        """``[world_size]`` bytes of the elements that each rank writes."""
        written = np.bincount(self.table.owner, self.table.nbytes, minlength=len(self.keys))
        return written.astype(np.int64)

    @cached_property
    def are_names_dotted(self) -> bool:
        """Whether every stored name is its path, joined by dots."""
        pairs = zip(self.names, self.table.keys, strict=True)
        return all(name == dotted(spec.path) for name, spec in pairs)


class Planner(ABC):
    """A kind of planner: a local plan on every rank, a global plan on the coordinator."""

    kind: ClassVar[str]

    @abstractmethod
    def local_plan(self, entries: Entries, rank: int, world_size: int) -> ChunkTable:
        """The chunks that this rank holds.

        One row per piece of an entry and one per value, in the order of the entries; an entry
        that shares another's memory has rows too.
        """

    @abstractmethod
    def global_plan(self, tables: list[ChunkTable]) -> GlobalPlan:
        """Who writes what, from the local plans in rank order. Called on the coordinator only.

        Raises:
            ShapeConflictError: ranks disagree about a key.
            ReplicaMismatchError: replicas differ.
            TilingError: the chunks do not tile the state.
        """
