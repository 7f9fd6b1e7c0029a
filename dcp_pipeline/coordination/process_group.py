"""Agreement over ``torch.distributed``, on a gloo group of its own.

The group is made once per process group, and once more for the background, and never shared with
training. Messages are bytes that
go to the coordinator and back, so that a rank that is gone is known by name. Every round runs in a
thread of its own while the caller keeps looking at the store, so that a rank which has lost contact
with one other can tell all the rest; see :mod:`dcp_pipeline.coordination.roll_call`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.coordination.base import Coordination
from dcp_pipeline.coordination.control_group import (
    NO_STORE,
    ControlGroup,
    control_group,
    first_words,
)
from dcp_pipeline.coordination.exchange import Decision, decide, open_answer, wrap_message
from dcp_pipeline.coordination.roll_call import INTERRUPTED, RollCall, Verdict
from dcp_pipeline.coordination.single_process import SingleProcessCoordinator
from dcp_pipeline.core.coordinator import Coordinator, Reduce
from dcp_pipeline.core.errors import CoordinationError, NotDistributedError, list_some

__all__ = ["ProcessGroupCoordination", "ProcessGroupCoordinator"]

_NOTED = 32
_LENGTH = struct.Struct("<q")


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
        self,
        process_group: Any = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
        background: bool = False,
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
        control = control_group(group, self._timeout, background)
        return ProcessGroupCoordinator(control, coordinator_rank, self._poll_seconds)


_LINGERING: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_LINGERING_SECONDS = 3.0


@atexit.register
def _wait_for_lingering() -> None:
    """Let threads of given-up rounds end while the interpreter still stands.

    They wake up when their partner ends, often at this very time; one that wakes up while the
    interpreter is taken down takes the whole process with it.
    """
    deadline = time.monotonic() + _LINGERING_SECONDS
    for thread in list(_LINGERING):
        thread.join(max(0.0, deadline - time.monotonic()))


class _LostContact(Exception):
    """Sending to or receiving from a rank has failed."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason


class ProcessGroupCoordinator(Coordinator):
    """One save or load of the ranks of a group."""

    def __init__(self, control: ControlGroup, coordinator_rank: int, poll_seconds: float) -> None:
        self._control = self.lane = control
        self._group = control.group
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.coordinator_rank = coordinator_rank
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        # All is over once the time is out: before that the ranks are called, answer, and decide.
        self._grace = min(max(2.0, 4 * poll_seconds), control.timeout / 4)
        # A rank that is there may get no processor for seconds.
        self._notice = min(max(10.0, 4 * poll_seconds), control.timeout / 4)
        self._waits_for: Sequence[int] = ()
        self._since = 0.0
        # Every rank makes its coordinators in the same order, so the number names the operation.
        turn, glance = control.take_turn(), min(poll_seconds, self._grace / 4)
        self._roll_call = RollCall(control.store, turn, self.rank, lambda: self._waits_for, glance)
        self._has_failed = False
        self._lost: tuple[int, ...] = ()

    def exchange(
        self, step: str, message: bytes | BaseException, reduce: Reduce | None = None
    ) -> bytes:
        own = message if isinstance(message, BaseException) else None
        failed: list[BaseException | None] = []
        decision = Decision()

        def round_trip() -> bytes:
            messages = self._gather(wrap_message(message))
            if messages is None:
                return self._receive(self.coordinator_rank)
            answers, error = decision.make(
                lambda: decide(step, messages, reduce, self.rank, self.world_size)
            )
            failed.append(error)
            for receiver, answer in enumerate(answers):
                if receiver != self.rank:
                    self._send(answer, [receiver])
            return answers[self.rank]

        answer = self._watched(step, round_trip, decision.give_up)
        return open_answer(step, answer, own or (failed[0] if failed else None), self.rank)

    def broadcast(self, step: str, data: bytes | None) -> bytes:
        parent, children = self._place_in_tree()

        def round_trip() -> bytes:
            if parent is None:
                assert data is not None
                message = data
            else:
                message = self._receive(parent)
            self._send(message, children)
            return message

        return self._watched(step, round_trip)

    def _place_in_tree(self) -> tuple[int | None, list[int]]:
        """Whom this rank hears from and whom it tells, in a binomial tree below the coordinator."""
        size, root = self.world_size, self.coordinator_rank
        place = (self.rank - root) % size
        span = place & -place if place else 1 << (size - 1).bit_length()
        parent = (place - span + root) % size if place else None
        steps = [1 << bit for bit in reversed(range(span.bit_length() - 1))]
        return parent, [(place + step + root) % size for step in steps if place + step < size]

    def pass_on(
        self, sends: list[tuple[int, memoryview]], receives: list[tuple[int, memoryview]]
    ) -> None:
        def transfer() -> bytes:
            pending: list[tuple[int, Any]] = []
            for rank, buffer in receives:
                pending.append((rank, self._begin_receive(rank, buffer)))
            for rank, buffer in sends:
                tensor = torch.frombuffer(buffer, dtype=torch.uint8)
                with self._contact(rank):
                    pending.append((rank, dist.isend(tensor, self._global(rank), self._group)))
            self._finish(pending)
            return b""

        if sends or receives:
            self._watched("read", transfer)

    def _gather(self, message: bytes) -> list[bytes] | None:
        if not self.is_coordinator:
            self._send(message, [self.coordinator_rank])
            return None
        # All at a time, so that nobody's send has to wait for a rank that does not answer.
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        lengths = self._receive_all(dict.fromkeys(others, _LENGTH.size))
        sizes = {rank: _LENGTH.unpack(length)[0] for rank, length in lengths.items()}
        received = self._receive_all(sizes) | {self.rank: message}
        return [received[rank] for rank in range(self.world_size)]

    def _receive_all(self, sizes: dict[int, int]) -> dict[int, bytes]:
        buffers = {rank: bytearray(size) for rank, size in sizes.items()}
        self._finish(
            [
                (rank, self._begin_receive(rank, memoryview(buffer)))
                for rank, buffer in buffers.items()
            ]
        )
        return {rank: bytes(buffer) for rank, buffer in buffers.items()}

    def _receive(self, sender: int) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_all({sender: _LENGTH.size})[sender])
        return self._receive_all({sender: length})[sender]

    def _send(self, message: bytes, receivers: Sequence[int]) -> None:
        for data in (_LENGTH.pack(len(message)), message):
            tensor, pending = _tensor(data), []
            for rank in receivers:
                with self._contact(rank):
                    pending.append((rank, dist.isend(tensor, self._global(rank), self._group)))
            self._finish(pending)

    def _begin_receive(self, rank: int, buffer: memoryview) -> Any:
        with self._contact(rank):
            return dist.irecv(_over(buffer), self._global(rank), self._group)

    def _finish(self, pending: Sequence[tuple[int, Any]]) -> None:
        """Wait for what was begun, noting for whom."""
        ranks = [rank for rank, _ in pending]
        for place, (_, work) in enumerate(pending):
            with self._contact(*ranks[place : place + _NOTED]):
                work.wait()

    @contextlib.contextmanager
    def _contact(self, *ranks: int) -> Iterator[None]:
        self._since, self._waits_for = time.monotonic(), ranks
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise _LostContact(ranks[0], first_words(error)) from error
        finally:
            self._waits_for = ()

    def _global(self, rank: int) -> int:
        return self._control.ranks[rank]

    def _watched(
        self, step: str, action: Callable[[], bytes], give_up: Callable[[], None] = lambda: None
    ) -> bytes:
        """Run ``action`` in a thread, and give it up when a rank is lost."""
        result: list[bytes] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def work() -> None:
            try:
                result.append(action())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        with self._control.lock:
            thread = threading.Thread(target=work, name=f"dcp_pipeline {step}", daemon=True)
            try:
                thread.start()
                verdict = self._watch(done)
                if errors and not dist.is_initialized():
                    raise CoordinationError(
                        f"torch.distributed was shut down during {step}: close the pipeline before"
                        " destroy_process_group"
                    ) from errors[0]
                if verdict is None and errors and isinstance(errors[0], _LostContact):
                    verdict = self._find(errors[0])
                if verdict is not None:
                    raise self._broken(step, verdict) from (errors[0] if errors else None)
            except BaseException as error:
                if not isinstance(error, Exception):
                    self._tell_interrupted()
                # The thread lives on until its message is given up, and must do nothing then.
                give_up()
                _LINGERING.add(thread)
                raise
            if errors:
                raise errors[0]
        return result[0]

    def _watch(self, done: threading.Event) -> Verdict | None:
        """Wait for the end of a round, or until it is known who is lost."""
        timeout, notice = self._control.timeout, self._notice
        while not done.wait(min(self._poll_seconds, self._grace / 4)):
            verdict = self._roll_call.look()
            if verdict is not None:
                return verdict
            waits_for, since = self._waits_for, self._since
            waited = time.monotonic() - since if waits_for else 0.0
            if waited > timeout - notice:
                self._roll_call.raise_alarm()
            if waited > timeout - notice / 2:
                return self._decide(waits_for, f"no answer for {timeout:g} s")
        return None

    def _find(self, lost: _LostContact) -> Verdict:
        """Who is lost, where contact to one rank is."""
        # That one may be there, and have given up a third.
        deadline = time.monotonic() + self._grace / 2
        self._roll_call.raise_alarm()
        while time.monotonic() < deadline:
            verdict = self._roll_call.look()
            if verdict is not None:
                return verdict
            time.sleep(min(self._poll_seconds, self._grace / 8))
        return self._decide([lost.rank], lost.reason)

    def _decide(self, suspects: Sequence[int], reason: str) -> Verdict:
        verdict = self._roll_call.decide(suspects, reason, self._grace / 4)
        if verdict.teller == self.rank:
            # This process may end with the error, and the store with it: the others look first.
            time.sleep(min(2 * self._poll_seconds, self._grace / 4))
        return verdict

    def _broken(self, step: str, verdict: Verdict) -> CoordinationError:
        self._control.is_broken = True
        self._lost = verdict.lost
        lost = [rank for rank in verdict.lost if rank != self.rank]
        reason = verdict.reason
        if not lost:
            # The teller sees that the other way round.
            lost, reason = [verdict.teller], f"it has given up this rank: {reason}"
        ranks = f"rank {lost[0]} was" if len(lost) == 1 else f"ranks {list_some(lost)} were"
        text = f"{ranks} lost during {step}: {reason}"
        if reason != INTERRUPTED:
            text += ". It has ended, or it did not answer within coordination.timeout_seconds"
        if self._control.store.does_not_answer:
            text += f". Another rank may be the one that is gone: {NO_STORE}"
        error = CoordinationError(text)
        error.is_shared = True
        return error

    def last_word(self, word: str = "") -> str:
        if self.is_coordinator:
            self._roll_call.leave_word(word)
            time.sleep(min(2 * self._poll_seconds, self._grace / 4))
            return word
        deadline = time.monotonic() + self._grace / 2
        while self.coordinator_rank not in self._lost and time.monotonic() < deadline:
            word = self._roll_call.word()
            if word:
                return word
            time.sleep(min(self._poll_seconds, self._grace / 8))
        return ""

    def _tell_interrupted(self) -> None:
        self._control.is_broken = True
        self._roll_call.tell_interrupted()

    def report_failure(self, error: BaseException) -> None:
        # The exchange that follows carries the error itself; this only wakes the others up.
        self._has_failed = True
        if not isinstance(error, Exception):
            # There is no exchange that follows.
            self._tell_interrupted()
        self._roll_call.tell_failed()

    def peer_failed(self) -> bool:
        now = time.monotonic()
        if self._has_failed or now < self._next_poll:
            return False
        self._next_poll = now + self._poll_seconds
        return self._roll_call.has_failure()


def _over(buffer: memoryview) -> torch.Tensor:
    if not len(buffer):
        # The caller may be inside a torch.device context.
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _tensor(data: bytes) -> torch.Tensor:
    return _over(memoryview(bytearray(data)))
