"""Node ``plan`` of the save: the chunks that this rank holds."""

from __future__ import annotations

from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.types.entries import Entries

__all__ = ["local_plan"]


def local_plan(staged: Entries, job: SaveJob) -> ChunkTable:
    """One row per piece or value, in the order of the entries."""
    staged.wait()
    coordinator = job.coordinator
    return job.parts.planner.local_plan(staged, coordinator.rank, coordinator.world_size)
