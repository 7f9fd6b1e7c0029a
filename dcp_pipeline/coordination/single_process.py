"""A job of one process: nobody to agree with."""

from __future__ import annotations

from dcp_pipeline.coordination.base import Coordination
from dcp_pipeline.coordination.exchange import decide, open_answer, wrap_message
from dcp_pipeline.core.coordinator import Coordinator, Reduce

__all__ = ["SingleProcessCoordination", "SingleProcessCoordinator"]


class SingleProcessCoordination(Coordination):
    """Saves and loads in this process alone, whatever ``torch.distributed`` says."""

    def coordinator(
        self,
        process_group: object = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
        background: bool = False,
    ) -> Coordinator:
        return SingleProcessCoordinator()


class SingleProcessCoordinator(Coordinator):
    """The only rank.

    Args:
        rank: the number it goes by, where somebody else coordinates it with others.
    """

    world_size = 1

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.coordinator_rank = rank

    def exchange(
        self, step: str, message: bytes | BaseException, reduce: Reduce | None = None
    ) -> bytes:
        own = message if isinstance(message, BaseException) else None
        answers, failed = decide(step, [wrap_message(message)], reduce, self.rank, 1)
        return open_answer(step, answers[0], own or failed, self.rank)

    def broadcast(self, step: str, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def pass_on(
        self, sends: list[tuple[int, memoryview]], receives: list[tuple[int, memoryview]]
    ) -> None:
        assert not sends and not receives

    def report_failure(self, error: BaseException) -> None:
        return None

    def peer_failed(self) -> bool:
        return False
