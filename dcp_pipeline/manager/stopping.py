"""The end of a run, as all ranks agree on it."""

from __future__ import annotations

import logging
from typing import Any

from dcp_pipeline.manager.events import CheckpointEvent, Events
from dcp_pipeline.manager.preemption import StopRequests
from dcp_pipeline.manager.ranks import Ranks

__all__ = ["Stopping"]

logger = logging.getLogger("dcp_pipeline")


class Stopping:
    """Whether the run is to end.

    Args:
        requests: whether this process was asked to.
        ranks: who agree.
        events: hears of it.

    Attributes:
        reason: why, once it was agreed; empty before.
    """

    def __init__(self, requests: StopRequests, ranks: Ranks, events: Events) -> None:
        self.reason = ""
        self._requests = requests
        self._ranks = ranks
        self._events = events

    def agreed(self) -> bool:
        """On all ranks together, until it was agreed once: whether any of them was asked."""
        if self.reason:
            return True
        mine: Any
        try:
            self._requests.listen()
            mine = [self._requests.reason(), self._requests.seconds_left()]
        except Exception as error:
            mine = error
        self.reason, left = self._ranks.decide("should_stop", mine, _first_reason)
        if self.reason:
            self._tell(left)
        return bool(self.reason)

    def _tell(self, left: float) -> None:
        if self._ranks.is_coordinator:
            logger.warning("stopping: %s; %.1f s of the grace period are left", self.reason, left)
        detail = {"reason": self.reason, "seconds_left": left}
        self._events.emit(CheckpointEvent("stopping", None, self._ranks.rank, detail=detail))


def _first_reason(asked: list[Any]) -> list[Any]:
    """On the coordinator: why the run is to end, and how long its most hurried rank has."""
    reasons = [f"{reason} on rank {rank}" for rank, (reason, _) in enumerate(asked) if reason]
    return [reasons[0] if reasons else "", min(left for _, left in asked)]
