"""What the nodes may ask of the other ranks; implementations live in ``coordination``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

__all__ = ["Coordinator", "Reduce"]

Reduce = Callable[[list[bytes]], Sequence[bytes]]
"""Run by the coordinator: every rank's message in rank order to every rank's answer."""


class Coordinator(ABC):
    """The ranks of one save or load, and how they come to an agreement.

    There is one way to agree: :meth:`exchange`. It carries failures too, so that a rank that
    cannot go on tells all others at the next step instead of leaving them waiting.

    Attributes:
        rank: this process, 0 to ``world_size - 1``.
        coordinator_rank: the rank that decides.
    """

    lane: object | None = None
    """What saves in the background have to follow one another on, in one order on all ranks."""

    rank: int
    world_size: int
    coordinator_rank: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == self.coordinator_rank

    @abstractmethod
    def exchange(
        self, step: str, message: bytes | BaseException, reduce: Reduce | None = None
    ) -> bytes:
        """Gather a message of every rank, let the coordinator reduce them, answer each rank.

        Args:
            step: named in errors.
            message: what this rank has to say, or the error that it ended with.
            reduce: called on the coordinator when no rank failed; ``None`` answers nothing.

        Returns:
            The coordinator's answer to this rank.

        Raises:
            CheckpointError: on every rank alike, if any rank or ``reduce`` failed. It is torch's
                ``CheckpointException`` too.
        """

    @abstractmethod
    def broadcast(self, step: str, data: bytes | None) -> bytes:
        """The coordinator's ``data`` on every rank; the others pass ``None``."""

    @abstractmethod
    def pass_on(
        self, sends: list[tuple[int, memoryview]], receives: list[tuple[int, memoryview]]
    ) -> None:
        """Send bytes to ranks and fill buffers with what ranks send, all at a time.

        Between two ranks, what is sent first is received first; both know how many bytes.
        """

    @abstractmethod
    def report_failure(self, error: BaseException) -> None:
        """Let the other ranks know, between two exchanges, that this one cannot go on.

        An ``error`` that is no ``Exception``, such as ``KeyboardInterrupt``, ends it here and now:
        the others do not wait for it at the next exchange.
        """

    @abstractmethod
    def peer_failed(self) -> bool:
        """Whether another rank has reported a failure; quick, and not collective."""

    def last_word(self, word: str = "") -> str:
        """What the coordinator has to say of a round that was broken off; not collective.

        Args:
            word: the coordinator's; the others pass none.

        Returns:
            The word; empty where none came within a second or so.
        """
        return word

    def close(self) -> None:
        """Give back groups and threads; the coordinator is not used afterwards."""
        return None
