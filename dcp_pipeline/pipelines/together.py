"""Runs a graph on this rank as one of several."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.quiet import without_collections
from dcp_pipeline.graph.runner import run
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.steps.load_again import Replaced
from dcp_pipeline.types.exceptions import CheckpointException, Failures, joint_error

__all__ = ["run_together"]


def run_together(
    graph: Graph,
    inputs: dict[str, Any],
    coordinator: Coordinator,
    trace: Trace,
    failure: BaseException | None = None,
    in_background: bool = False,
) -> dict[str, Any]:
    """Run a graph together with the other ranks, who hear of it at once if this one goes away.

    Args:
        failure: what went wrong on this rank before, where ``graph`` is the second half of another.

        in_background: training goes on meanwhile, so the garbage collector does too.

    Raises:
        CheckpointException: whatever failed, here or elsewhere; it has the type of its cause too.
        Replaced: a load has to start again.
    """
    is_coordinator, report = coordinator.is_coordinator, coordinator.report_failure
    try:
        with nullcontext() if in_background else without_collections():
            return run(graph, inputs, trace, is_coordinator, report, failure)
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
