"""Runs a graph on one rank; knows nothing of what the nodes do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from dcp_pipeline.core.errors import GraphError
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node, Where
from dcp_pipeline.graph.trace import NodeTiming, Trace

__all__ = ["is_shared", "run"]


def run(
    graph: Graph,
    values: Mapping[str, Any],
    trace: Trace,
    is_coordinator: bool = True,
    on_failure: Callable[[BaseException], None] = lambda error: None,
    failure: BaseException | None = None,
) -> dict[str, Any]:
    """Run every node in order and return all values.

    When a node fails, the nodes behind it are left out, but for those that coordinate: the first
    of them tells the other ranks, and raises what all ranks raise.

    Args:
        values: the graph's inputs.
        trace: gets one timing per node that ran.
        is_coordinator: whether nodes of the coordinator run here.
        on_failure: called at once with the error of a node.
        failure: what went wrong before this graph, where it is the second half of another.

    Raises:
        whatever a node raised; the error carries ``node`` and ``rank``.
    """
    known = dict(values)
    for node in graph:
        if failure is not None and not node.coordinates:
            continue
        if node.where is Where.COORDINATOR and not is_coordinator:
            known.update(dict.fromkeys(node.outputs))
            continue
        started = time.perf_counter()
        try:
            result = _call(node, known, failure)
        except BaseException as error:
            _annotate(error, node, trace.rank)
            was_told = node.coordinates and failure is not None
            if was_told or is_shared(error) or isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            # What went wrong here alone is told at the next node that coordinates.
            failure = error
            on_failure(error)
            continue
        seconds = time.perf_counter() - started
        known.update(_outputs(node, result))
        trace.timings.append(NodeTiming(node.name, seconds, _nbytes(node, known)))
    if failure is not None:
        raise failure
    return known


def is_shared(error: BaseException) -> bool:
    """Whether the other ranks know of an error already, so that nobody has to be told."""
    return bool(getattr(error, "is_shared", False))


def _call(node: Node, known: Mapping[str, Any], failure: BaseException | None) -> Any:
    if not node.coordinates:
        return node.function(**{name: known[name] for name in node.inputs})
    arguments = {name: known.get(name) for name in node.inputs}
    return node.function(**arguments, failure=failure)


def _outputs(node: Node, result: Any) -> dict[str, Any]:
    if len(node.outputs) == 1:
        return {node.outputs[0]: result}
    if not node.outputs:
        return {}
    if not isinstance(result, tuple) or len(result) != len(node.outputs):
        raise GraphError(f"node {node.name!r} has to return a tuple of {len(node.outputs)} values")
    return dict(zip(node.outputs, result, strict=True))


def _nbytes(node: Node, known: Mapping[str, Any]) -> int | None:
    counts = [getattr(known[name], "nbytes", None) for name in node.outputs]
    numbers = [count for count in counts if isinstance(count, int)]
    return sum(numbers) if numbers else None


def _annotate(error: BaseException, node: Node, rank: int) -> None:
    if not hasattr(error, "node"):
        with contextlib.suppress(AttributeError, TypeError):
            error.node = node.name  # type: ignore[attr-defined]
            error.rank = rank  # type: ignore[attr-defined]
    error.add_note(f"in node {node.name!r} on rank {rank}")
