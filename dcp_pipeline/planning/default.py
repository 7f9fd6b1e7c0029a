"""The default planner: every byte is written once, by ranks that all write about as much."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import xxhash

from dcp_pipeline.core.checksum import array_digest
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.core.tiling import check_tiling
from dcp_pipeline.planning.balance import assign_writers
from dcp_pipeline.planning.base import GlobalPlan, Planner
from dcp_pipeline.planning.merge import merge_tables
from dcp_pipeline.planning.replicas import check_replicas_equal, group_replicas
from dcp_pipeline.types.entries import Entries, Piece
from dcp_pipeline.types.memory import is_plain_memory, segments_of

__all__ = ["DefaultPlanner"]


class DefaultPlanner(Planner):
    """Removes replicas, splits them among the ranks that hold them, proves the tiling.

    Args:
        dedup: ``balanced`` spreads replicas so that all ranks write about the same number of bytes;
            ``lowest_rank`` leaves each to the lowest rank that holds it.
        check_replicas: compare hashes of what several ranks may hold under one key.
        split_bytes: replicas smaller than this are written by one rank, whole.
    """

    kind: ClassVar[str] = "default"

    def __init__(
        self, dedup: str = "balanced", check_replicas: bool = True, split_bytes: int = 4096
    ) -> None:
        self._dedup = dedup
        self._check_replicas = check_replicas
        self._split_bytes = split_bytes

    def local_plan(self, entries: Entries, rank: int, world_size: int) -> ChunkTable:
        key: list[int] = []
        offsets: list[tuple[int, ...]] = []
        sizes: list[tuple[int, ...]] = []
        digest: list[int] = []
        length: list[int] = []
        compare = self._check_replicas and world_size > 1
        for position, entry in enumerate(entries):
            if entry.dtype is None:
                key.append(position)
                offsets.append(())
                sizes.append(())
                digest.append(entry.digest if compare else 0)
                length.append(len(entry.payload))
            for piece in entry.pieces:
                key.append(position)
                offsets.append(piece.offsets)
                sizes.append(piece.sizes)
                digest.append(_digest(piece) if compare and entry.may_repeat else 0)
                length.append(piece.data.numel() * piece.data.element_size())
        table = ChunkTable.build([e.spec for e in entries], key, offsets, sizes, rank, digest)
        table.length[:] = length
        return table

    def global_plan(self, tables: list[ChunkTable]) -> GlobalPlan:
        merged = merge_tables(tables)
        groups = group_replicas(merged.table)
        if self._check_replicas:
            check_replicas_equal(merged.table, groups, merged.names)
        split = self._split_bytes if self._dedup == "balanced" else None
        table, row = assign_writers(merged.table, merged.row, groups, len(tables), split)
        check_tiling(table, merged.is_alias)
        return GlobalPlan(merged.names, table, row, merged.keys)


def _digest(piece: Piece) -> int:
    if is_plain_memory(piece.data):
        return array_digest(next(segments_of(piece.data)))
    state = xxhash.xxh3_64()
    for segment in segments_of(piece.data):
        state.update(segment)
    return int(np.uint64(state.intdigest() or 1).astype(np.int64))
