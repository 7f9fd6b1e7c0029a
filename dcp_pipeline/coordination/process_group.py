"""Agreement over ``torch.distributed``, on a gloo group of its own.

The group is made once per process group, and once more for the background, and never shared with
training. Messages are bytes that
go to the coordinator and back, so that a rank that is gone is known by name. Every round runs in a
thread of its own while the caller keeps looking at the store, so that a rank which has lost contact
with one other can tell all the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_pipeline.coordination.base import Coordination
from dcp_pipeline.coordination.exchange import Decision, decide, open_answer, wrap_message
from dcp_pipeline.coordination.single_process import SingleProcessCoordinator
from dcp_pipeline.core.coordinator import Coordinator, Reduce
from dcp_pipeline.core.errors import CoordinationError, NotDistributedError

__all__ = ["ProcessGroupCoordination", "ProcessGroupCoordinator"]

T = TypeVar("T")

_GRACE_POLLS = 6
_INTERRUPTED = "it was interrupted"
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
        control = _control_group(group, self._timeout, background)
        return ProcessGroupCoordinator(control, coordinator_rank, self._poll_seconds)


class _ControlGroup:
    """A gloo group with the ranks of another group, and a store to look at between messages."""

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self.timeout = timeout
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.group = dist.new_group(
            self.ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        default_store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore(f"dcp_pipeline/{self.group.group_name}", default_store)
        self.turns = itertools.count()
        self.lock = threading.Lock()
        self.is_broken = False
        self.has_lost_store = False


_CONTROL_GROUPS: weakref.WeakKeyDictionary[Any, dict[tuple[timedelta, bool], _ControlGroup]]
_CONTROL_GROUPS = weakref.WeakKeyDictionary()
"""Groups live as long as the process group they were made for; making one takes a rendezvous."""

_CREATION = threading.Lock()


def _control_group(group: Any, timeout: timedelta, background: bool) -> _ControlGroup:
    with _CREATION:
        known = _CONTROL_GROUPS.setdefault(group, {})
        kind = timeout, background
        if kind not in known or known[kind].is_broken:
            try:
                known[kind] = _ControlGroup(group, timeout)
            except (RuntimeError, ValueError) as error:
                ranks = dist.get_process_group_ranks(group)
                raise CoordinationError(
                    f"the ranks {ranks} did not all come to the save or load within"
                    f" {timeout.total_seconds():g} s (coordination.timeout_seconds): one has failed"
                    f" before, or never called it: {str(error).splitlines()[0]}"
                ) from error
        return known[kind]


class _LostContact(Exception):
    """Sending to or receiving from a rank has failed."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank
        self.reason = reason


class ProcessGroupCoordinator(Coordinator):
    """One save or load of the ranks of a group."""

    def __init__(self, control: _ControlGroup, coordinator_rank: int, poll_seconds: float) -> None:
        self._control = self.lane = control
        self._group = control.group
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self.coordinator_rank = coordinator_rank
        self._poll_seconds = poll_seconds
        self._next_poll = 0.0
        # Every rank makes its coordinators in the same order, so the number names the operation.
        turn = next(control.turns)
        self._failure_key = f"failed/{turn}"
        self._lost_key = f"lost/{turn}"
        self._has_failed = False

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
            self._send_all(answers)
            return answers[self.rank]

        answer = self._watched(step, round_trip, decision.give_up)
        return open_answer(step, answer, own or (failed[0] if failed else None), self.rank)

    def broadcast(self, step: str, data: bytes | None) -> bytes:
        def round_trip() -> bytes:
            source = self._global(self.coordinator_rank)
            length = torch.tensor([len(data or b"")], device="cpu")
            with _contact(self.coordinator_rank):
                dist.broadcast(length, source, self._group)
                size = int(length)
                buffer = _empty(size) if data is None else _tensor(data)
                dist.broadcast(buffer, source, self._group)
            return buffer.numpy().tobytes() if data is None else data

        return self._watched(step, round_trip)

    def pass_on(
        self, sends: list[tuple[int, memoryview]], receives: list[tuple[int, memoryview]]
    ) -> None:
        def transfer() -> bytes:
            pending: list[tuple[int, Any]] = []
            for rank, buffer in receives:
                tensor = torch.frombuffer(buffer, dtype=torch.uint8)
                with _contact(rank):
                    pending.append((rank, dist.irecv(tensor, self._global(rank), self._group)))
            for rank, buffer in sends:
                tensor = torch.frombuffer(buffer, dtype=torch.uint8)
                with _contact(rank):
                    pending.append((rank, dist.isend(tensor, self._global(rank), self._group)))
            for rank, work in pending:
                with _contact(rank):
                    work.wait()
            return b""

        if sends or receives:
            self._watched("read", transfer)

    def _gather(self, message: bytes) -> list[bytes] | None:
        if not self.is_coordinator:
            self._send(message, self.coordinator_rank)
            return None
        # All at a time, so that nobody's send has to wait for a rank that does not answer.
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        lengths = self._receive_all(dict.fromkeys(others, _LENGTH.size))
        sizes = {rank: _LENGTH.unpack(length)[0] for rank, length in lengths.items()}
        received = self._receive_all(sizes) | {self.rank: message}
        return [received[rank] for rank in range(self.world_size)]

    def _receive_all(self, sizes: dict[int, int]) -> dict[int, bytes]:
        buffers = {rank: _empty(size) for rank, size in sizes.items()}
        pending: dict[int, Any] = {}
        for rank, buffer in buffers.items():
            with _contact(rank):
                pending[rank] = dist.irecv(buffer, self._global(rank), self._group)
        for rank, work in pending.items():
            with _contact(rank):
                work.wait()
        return {rank: buffer.numpy().tobytes() for rank, buffer in buffers.items()}

    def _send_all(self, answers: list[bytes]) -> None:
        for receiver, answer in enumerate(answers):
            if receiver != self.rank:
                self._send(answer, receiver)

    def _send(self, message: bytes, receiver: int) -> None:
        with _contact(receiver):
            dist.send(_tensor(_LENGTH.pack(len(message))), self._global(receiver), self._group)
            dist.send(_tensor(message), self._global(receiver), self._group)

    def _receive(self, sender: int) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_all({sender: _LENGTH.size})[sender])
        return self._receive_all({sender: length})[sender]

    def _global(self, rank: int) -> int:
        return self._control.ranks[rank]

    def _watched(
        self, step: str, action: Callable[[], bytes], give_up: Callable[[], None] = lambda: None
    ) -> bytes:
        """Run ``action`` in a thread, and give it up when another rank has lost contact."""
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
            threading.Thread(target=work, name=f"dcp_pipeline {step}", daemon=True).start()
            try:
                while not done.wait(self._poll_seconds):
                    lost = self._lost()
                    if lost is not None:
                        raise self._broken(step, *lost)
            except BaseException as error:
                if not isinstance(error, Exception):
                    self._tell_interrupted()
                # The thread lives on until its message is given up, and must do nothing then.
                give_up()
                raise
            if errors:
                raise self._explain(step, errors[0]) from errors[0]
        return result[0]

    def _explain(self, step: str, error: BaseException) -> BaseException:
        if not isinstance(error, _LostContact):
            return error
        # Another rank may know better who is gone: one whose own partner is gone stops answering.
        for _ in range(_GRACE_POLLS):
            lost = self._lost()
            if lost is not None:
                return self._broken(step, *lost)
            if error.rank != self.coordinator_rank:
                break
            time.sleep(self._poll_seconds / 2)
        self._tell_lost(error.rank, error.reason)
        # This process may end with the error, and the store with it: the others look first.
        time.sleep(2 * self._poll_seconds)
        return self._broken(step, error.rank, error.reason)

    def _broken(self, step: str, rank: int, reason: str) -> CoordinationError:
        self._control.is_broken = True
        if reason == _INTERRUPTED:
            error = CoordinationError(f"rank {rank} was lost during {step}: {reason}")
        else:
            error = CoordinationError(
                f"rank {rank} was lost during {step}: {reason}. It has ended, or it did not"
                " answer within coordination.timeout_seconds"
            )
        error.is_shared = True
        return error

    def _lost(self) -> tuple[int, str] | None:
        if not self._is_set(self._lost_key):
            return None
        told = self._ask_store(lambda store: store.get(self._lost_key))
        if told is None:
            return None
        rank, _, reason = told.decode().partition(" ")
        return int(rank), reason

    def _tell_lost(self, rank: int, reason: str) -> None:
        self._set(self._lost_key, f"{rank} {reason}")

    def _tell_interrupted(self) -> None:
        self._control.is_broken = True
        self._tell_lost(self.rank, _INTERRUPTED)

    def _is_set(self, key: str) -> bool:
        return bool(self._ask_store(lambda store: store.check([key])))

    def _set(self, key: str, value: str) -> None:
        self._ask_store(lambda store: store.set(key, value))

    def _ask_store(self, question: Callable[[Any], Any]) -> Any:
        """An answer of the store, ``None`` once its host is gone: more questions would be noise."""
        if self._control.has_lost_store:
            return None
        answers: list[Any] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(question(self._control.store))

        # A host that was stopped lets one wait for minutes, and no signal gets through to there.
        asking = threading.Thread(target=ask, name="dcp_pipeline store", daemon=True)
        asking.start()
        asking.join(self._control.timeout.total_seconds())
        if answers:
            return answers[0]
        self._control.has_lost_store = True
        return None

    def report_failure(self, error: BaseException) -> None:
        # The exchange that follows carries the error itself; this only wakes the others up.
        self._has_failed = True
        if not isinstance(error, Exception):
            # There is no exchange that follows.
            self._tell_interrupted()
        self._set(self._failure_key, str(self.rank))

    def peer_failed(self) -> bool:
        now = time.monotonic()
        if self._has_failed or now < self._next_poll:
            return False
        self._next_poll = now + self._poll_seconds
        return self._is_set(self._failure_key)


@contextlib.contextmanager
def _contact(rank: int) -> Any:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise _LostContact(rank, str(error).splitlines()[0]) from error


def _empty(size: int) -> torch.Tensor:
    # The caller may be inside a torch.device context.
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
