"""Runs a graph on this rank as one of several."""

from __future__ import annotations

import traceback
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.runner import run
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.steps.load_again import Replaced
from dcp_pipeline.types.exceptions import CheckpointException, Failures, joint_error

__all__ = ["run_together"]


def run_together(
    graph: Graph, inputs: dict[str, Any], coordinator: Coordinator, trace: Trace
) -> dict[str, Any]:
    """Run a graph together with the other ranks, who hear of it at once if this one goes away.

    Raises:
        CheckpointException: whatever failed, here or elsewhere; it has the type of its cause too.
        Replaced: a load has to start again.
    """
    try:
        return run(graph, inputs, trace, coordinator.is_coordinator, coordinator.report_failure)
    except (CheckpointException, Replaced):
        raise
    except Exception as error:
        # Of what this rank alone knows: a rank that was lost, a node behind the last agreement.
        rank = coordinator.rank
        failures: Failures = {rank: (error, traceback.extract_tb(error.__traceback__))}
        raise joint_error(graph.name, failures, rank) from error
    except BaseException as error:
        coordinator.report_failure(error)
        raise
