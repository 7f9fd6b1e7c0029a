"""The end of a save, which is the same for all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.pipelines.together import run_together

__all__ = ["complete"]

logger = logging.getLogger("dcp_pipeline")


def complete(
    graph: Graph,
    inputs: Mapping[str, Any],
    job: SaveJob,
    trace: Trace,
    failure: BaseException | None = None,
    in_background: bool = False,
) -> SavedMetadata:
    """Run a graph that ends with a commit, and tidy up however it ends.

    Args:
        graph, failure, in_background: as for :func:`run_together`.

    Raises:
        CheckpointException: nothing was committed, unless the error says so.
    """
    coordinator = job.coordinator
    try:
        values = run_together(graph, dict(inputs), coordinator, trace, failure, in_background)
        job.finish()
    except BaseException:
        job.abandon()
        raise
    trace.slowest_writer = job.slowest_writer
    if coordinator.is_coordinator:
        logger.info("saved %s in %.3f s: %s", job.directory.location, trace.seconds, trace)
    return SavedMetadata(values["manifest"], job.directory.location, trace)
