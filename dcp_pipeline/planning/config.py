"""Configs of the planners, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dcp_pipeline.core.kind import Bytes, KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.planning.default import DefaultPlanner

__all__ = ["DefaultPlannerConfig"]


class DefaultPlannerConfig(KindConfig):
    """Stores each replica once and shares the writing among the ranks.

    Attributes:
        dedup: which of the ranks that hold a replica writes it: ``balanced`` evens out the bytes
            that the ranks write, ``lowest_rank`` takes the lowest.
        check_replicas: compare hashes of replicas, and refuse to save when they differ.
        split_bytes: a replica of this size or larger may be split between two writers.
    """

    kind: Literal["default"] = "default"
    dedup: Literal["balanced", "lowest_rank"] = "balanced"
    check_replicas: bool = True
    split_bytes: Bytes = 4096

    def build(self) -> DefaultPlanner:
        """Make the planner."""
        from dcp_pipeline.planning.default import DefaultPlanner

        return DefaultPlanner(
            dedup=self.dedup, check_replicas=self.check_replicas, split_bytes=self.split_bytes
        )
