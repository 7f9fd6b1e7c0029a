"""Ranks as threads of this process: the real graphs, a coordinator without a process group.

Hundreds of saves and loads on up to four ranks take seconds; nothing but the messages is simulated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator, Reduce
from dcp_pipeline.pipeline import Pipeline

__all__ = ["Ranks"]


class _Group:
    """What the threads of one save or load share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.messages: list[bytes | BaseException] = [b""] * size
        self.answers: list[bytes] = []
        self.data = b""
        self.mail: dict[tuple[int, int], list[bytes]] = {}
        self.error: BaseException | None = None


class ThreadCoordinator(Coordinator):
    """One of the ranks of a group of threads."""

    coordinator_rank = 0

    def __init__(self, group: _Group, rank: int, size: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = size

    def exchange(
        self, step: str, message: bytes | BaseException, reduce: Reduce | None = None
    ) -> bytes:
        group = self._group
        group.messages[self.rank] = message
        group.barrier.wait()
        if self.is_coordinator:
            group.answers = [b""] * self.world_size
            errors = [found for found in group.messages if isinstance(found, BaseException)]
            group.error = errors[0] if errors else None
            if reduce is not None and not errors:
                try:
                    group.answers = list(reduce([bytes(m) for m in group.messages]))  # type: ignore[arg-type]
                except BaseException as error:
                    group.error = error
        group.barrier.wait()
        if group.error is not None:
            raise group.error
        answer = group.answers[self.rank]
        group.barrier.wait()
        return answer

    def broadcast(self, step: str, data: bytes | None) -> bytes:
        if data is not None:
            self._group.data = data
        self._group.barrier.wait()
        data = self._group.data
        self._group.barrier.wait()
        return data

    def pass_on(
        self, sends: list[tuple[int, memoryview]], receives: list[tuple[int, memoryview]]
    ) -> None:
        group = self._group
        for receiver, data in sends:
            group.mail.setdefault((self.rank, receiver), []).append(bytes(data))
        group.barrier.wait()
        for sender, target in receives:
            target[:] = group.mail[sender, self.rank].pop(0)
        group.barrier.wait()

    def report_failure(self, error: BaseException) -> None:
        return None

    def peer_failed(self) -> bool:
        return False


class Ranks:
    """Up to ``limit`` ranks, each with a pipeline of its own.

    Args:
        config: of the pipelines.
    """

    def __init__(self, config: dict[str, Any], limit: int = 4) -> None:
        self._threads = ThreadPoolExecutor(limit)
        self._pipelines = [Pipeline.from_config(config) for _ in range(limit)]

    def run(self, size: int, function: Callable[[Pipeline, int], Any]) -> list[Any]:
        """``function(pipeline, rank)`` on ``size`` ranks at once; their results."""
        group = _Group(size)

        def one(rank: int) -> Any:
            pipeline = self._pipelines[rank]
            coordinator = ThreadCoordinator(group, rank, size)
            pipeline.coordinator = lambda *args, **kwargs: coordinator  # type: ignore[method-assign]
            try:
                return function(pipeline, rank)
            except BaseException:
                group.barrier.abort()
                raise

        futures = [self._threads.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        for pipeline in self._pipelines:
            pipeline.close()
