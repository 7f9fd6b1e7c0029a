"""What a manager tells whoever wants to count and plot it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dcp_pipeline.graph.trace import Trace

__all__ = ["CheckpointEvent", "Events", "OnEvent"]

logger = logging.getLogger("dcp_pipeline")


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """Something that has happened to a step, on this rank.

    Attributes:
        kind: ``node`` for each node of a save or a load, then ``saved`` or ``restored`` for the
            whole; ``failed`` and ``skipped`` for a save; ``damaged`` for a step that a restore
            goes past; ``removed``; ``stopping`` when the run is to end.
        step: the step, ``None`` where it is of none.
        rank: of this process.
        node: name of the node: ``stage``, ``plan``, ``write``, ``commit`` ….
        seconds: that it took.
        nbytes: bytes that were moved on this rank; ``None`` where none are.
        slowest_rank, slowest_seconds: the rank whose write took longest, on the coordinator alone.
        detail: what else there is to say: ``path``, ``error``, ``reason``, ``metrics`` ….
    """

    kind: Literal[
        "node", "saved", "failed", "skipped", "restored", "damaged", "removed", "stopping"
    ]
    step: int | None
    rank: int
    node: str = ""
    seconds: float = 0.0
    nbytes: int | None = None
    slowest_rank: int | None = None
    slowest_seconds: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


OnEvent = Callable[[CheckpointEvent], None]
"""Called on every rank; from the thread that saves, where that is one in the background."""


class Events:
    """Hands events to a callback, whose errors are its own.

    Args:
        on_event: the callback, if there is one.
    """

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def emit(self, event: CheckpointEvent) -> None:
        """Hand over one event; an exception of the callback is logged."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event has failed for %s", event)

    def nodes(self, step: int, trace: Trace) -> None:
        """Hand over one event for each node of a save or a load."""
        for timing in trace.timings:
            self.emit(
                CheckpointEvent(
                    "node", step, trace.rank, timing.node, timing.seconds, timing.nbytes
                )
            )

    def saved(self, step: int, trace: Trace, seconds: float, **detail: Any) -> None:
        """Hand over the nodes of a save, then the whole of it."""
        self.nodes(step, trace)
        rank, slowest = trace.slowest_writer or (None, None)
        written = sum(t.nbytes or 0 for t in trace.timings if t.node == "write")
        self.emit(
            CheckpointEvent("saved", step, trace.rank, "", seconds, written, rank, slowest, detail)
        )
