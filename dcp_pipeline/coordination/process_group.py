"""Agreement over ``torch.distributed``, on a gloo group of its own.

The group is made once per process group and never shared with training. Messages are bytes:
lengths are gathered first, then each rank sends exactly what it has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.coordination.base import Coordination
from dcp_pipeline.coordination.exchange import decide, open_answer, wrap_message
from dcp_pipeline.coordination.single_process import SingleProcessCoordinator
from dcp_pipeline.core.coordinator import Coordinator, Reduce
from dcp_pipeline.core.errors import CheckpointError, CoordinationError, NotDistributedError

__all__ = ["ProcessGroupCoordination", "ProcessGroupCoordinator"]


class ProcessGroupCoordination(Coordination):
    """The ranks of a process group; one process where there is none.

    Args:
        timeout_seconds: after which a rank that does not answer is given up.
        poll_seconds: between two looks whether another rank has failed.
    """

    def __init__(self, timeout_seconds: float = 1800.0, poll_seconds: float = 0.5) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self._poll_seconds = poll_seconds

    def coordinator(
        self, process_group: Any = None, no_dist: bool = False, coordinator_rank: int = 0
    ) -> Coordinator:
        if no_dist:
            return SingleProcessCoordinator()
        if not (dist.is_available() and dist.is_initialized()):
            world_size = os.environ.get("WORLD_SIZE", "1")
            if world_size.isdigit() and int(world_size) > 1:
                raise NotDistributedError(
                    f"WORLD_SIZE is {world_size}, but torch.distributed has no process group: every"
                    " rank would save over the others. Call init_process_group first, or pass"
                    " no_dist=True to save each rank's state on its own"
                )
            return SingleProcessCoordinator()
        group = process_group if process_group is not None else dist.group.WORLD
        control = _control_group(group, self._timeout)
        return ProcessGroupCoordinator(control, coordinator_rank, self._poll_seconds)


_CONTROL_GROUPS: weakref.WeakKeyDictionary[Any, dict[timedelta, _ControlGroup]]
_CONTROL_GROUPS = weakref.WeakKeyDictionary()
"""Groups live as long as the process group they were made for; making one takes a rendezvous."""

_CREATION = threading.Lock()


class _ControlGroup:
    """A gloo group with the ranks of another group, and a store to look at between collectives."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.group = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        store = dist.distributed_c10d._get_default_store()
        name = f"dcp_pipeline/{self.group.group_name}"
        self.store = dist.PrefixStore(name, store)
        self.ranks = ranks
        self.turns = itertools.count()
        self.lock = threading.Lock()


def _control_group(group: Any, timeout: timedelta) -> _ControlGroup:
    with _CREATION:
        known = _CONTROL_GROUPS.setdefault(group, {})
        if timeout not in known:
            known[timeout] = _ControlGroup(group, timeout)
        return known[timeout]


class ProcessGroupCoordinator(Coordinator):
    """One save or load of the ranks of a group."""

    def __init__(self, control: _ControlGroup, coordinator_rank: int, poll_seconds: float) -> None:
        self._control = control
        self._group = control.group
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.coordinator_rank = coordinator_rank
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        # Every rank makes its coordinators in the same order, so the number names the operation.
        self._failure_key = f"failed/{next(control.turns)}"
        self._has_failed = False

    def exchange(
        self, step: str, message: bytes | BaseException, reduce: Reduce | None = None
    ) -> bytes:
        own = message if isinstance(message, BaseException) else None
        with self._control.lock, _collective(step, self.rank):
            messages = self._gather(wrap_message(message))
            answers = None
            if messages is not None:
                answers, failed = decide(step, messages, reduce, self.rank, self.world_size)
                own = own or failed
            answer = self._scatter(answers)
        return open_answer(step, answer, own, self.rank)

    def broadcast(self, step: str, data: bytes | None) -> bytes:
        source = self._global(self.coordinator_rank)
        with self._control.lock, _collective(step, self.rank):
            length = torch.tensor([len(data or b"")])
            dist.broadcast(length, source, self._group)
            buffer = torch.empty(int(length), dtype=torch.uint8) if data is None else _tensor(data)
            dist.broadcast(buffer, source, self._group)
        return buffer.numpy().tobytes() if data is None else data

    def _gather(self, message: bytes) -> list[bytes] | None:
        length = torch.tensor([len(message)])
        if not self.is_coordinator:
            dist.gather(length, dst=self._global(self.coordinator_rank), group=self._group)
            dist.send(_tensor(message), self._global(self.coordinator_rank), self._group)
            return None
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.gather(length, lengths, self._global(self.rank), self._group)
        received: list[bytes] = []
        for sender in range(self.world_size):
            if sender == self.rank:
                received.append(message)
                continue
            buffer = torch.empty(int(lengths[sender]), dtype=torch.uint8)
            dist.recv(buffer, self._global(sender), self._group)
            received.append(buffer.numpy().tobytes())
        return received

    def _scatter(self, answers: list[bytes] | None) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        if answers is None:
            dist.scatter(length, src=self._global(self.coordinator_rank), group=self._group)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(buffer, self._global(self.coordinator_rank), self._group)
            return buffer.numpy().tobytes()
        lengths = [torch.tensor([len(answer)]) for answer in answers]
        dist.scatter(length, lengths, self._global(self.rank), self._group)
        pending = [
            dist.isend(_tensor(answer), self._global(receiver), self._group)
            for receiver, answer in enumerate(answers)
            if receiver != self.rank
        ]
        for work in pending:
            if work is not None:
                work.wait()
        return answers[self.rank]

    def _global(self, rank: int) -> int:
        return self._control.ranks[rank]

    def report_failure(self, error: BaseException) -> None:
        # The exchange that follows carries the error itself; this only wakes the others up.
        self._has_failed = True
        with contextlib.suppress(RuntimeError):
            self._control.store.set(self._failure_key, str(self.rank))

    def peer_failed(self) -> bool:
        now = time.monotonic()
        if self._has_failed or now < self._next_poll:
            return False
        self._next_poll = now + self._poll_seconds
        try:
            return bool(self._control.store.check([self._failure_key]))
        except RuntimeError:
            return False


@contextlib.contextmanager
def _collective(step: str, rank: int) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (RuntimeError, ValueError) as error:
        raise CoordinationError(
            f"rank {rank} lost contact with another rank during {step}: {error}. Either it has ended"
            " or it did not answer within coordination.timeout_seconds"
        ) from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
