"""One rank of the run decides; the others hear what."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dcp_pipeline.pipeline import Pipeline

__all__ = ["Ranks"]


class Ranks:
    """The ranks of a run.

    Args:
        pipeline: by whose config they agree.
        group: the process group, ``None`` for all ranks.

    Attributes:
        rank: of this process, 0 until the ranks have first agreed on something.
        world_size: how many there are, as ``rank``.
        is_coordinator: whether this is the one that decides.
    """

    def __init__(self, pipeline: Pipeline, group: Any) -> None:
        self.group = group
        self.rank = 0
        self.world_size = 1
        self.is_coordinator = False
        self._pipeline = pipeline

    def decide(
        self, what: str, mine: Any, decision: Callable[[list[Any]], Any] = lambda messages: None
    ) -> Any:
        """On all ranks together: let the coordinator decide.

        Args:
            what: named in errors.
            mine: what this rank has to say, as plain JSON data, or the error that it ended with.
            decision: called on the coordinator with what every rank has said.

        Returns:
            What ``decision`` returned there, as plain JSON data.

        Raises:
            CheckpointException: any rank came with an error, or ``decision`` raised one.
        """
        coordinator = self._pipeline.coordinator(self.group)
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        self.is_coordinator = coordinator.is_coordinator

        def reduce(messages: list[bytes]) -> list[bytes]:
            answer = json.dumps(decision([json.loads(message) for message in messages]))
            return [answer.encode()] * len(messages)

        message = mine if isinstance(mine, BaseException) else json.dumps(mine).encode()
        return json.loads(coordinator.exchange(what, message, reduce))
