"""One round of agreement, apart from how the messages get from rank to rank."""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dcp_pipeline.coordination.errors import error_from_record, error_to_record
from dcp_pipeline.core.coordinator import Reduce
from dcp_pipeline.core.errors import CheckpointError, CoordinationError, PeerFailedError
from dcp_pipeline.types.exceptions import CheckpointException, Failures, joint_error

__all__ = ["Decision", "decide", "open_answer", "wrap_message"]

T = TypeVar("T")

_FINE = b"\0"
_FAILED = b"\1"


class Decision:
    """What the coordinator does for all ranks in a round: made whole, or not begun at all.

    It is made in a thread that nobody waits for once contact is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_given_up = False

    def make(self, action: Callable[[], T]) -> T:
        """Do ``action``, unless the round was given up before.

        Raises:
            CoordinationError: it was.
        """
        with self._lock:
            if self._is_given_up:
                raise CoordinationError("the round was given up")
            return action()

    def give_up(self) -> None:
        """Make sure that nothing begins any more, and wait for what has begun."""
        with self._lock:
            self._is_given_up = True


def wrap_message(message: bytes | BaseException) -> bytes:
    """A rank's message, or its error, as it travels."""
    if isinstance(message, bytes):
        return _FINE + message
    return _FAILED + json.dumps(error_to_record(message)).encode()


def decide(
    step: str, messages: Sequence[bytes], reduce: Reduce | None, rank: int, world_size: int
) -> tuple[list[bytes], BaseException | None]:
    """The coordinator's answer to each rank, and its own error if ``reduce`` raised it."""
    failures = {
        sender: json.loads(message[1:])
        for sender, message in enumerate(messages)
        if message[:1] == _FAILED
    }
    own: BaseException | None = None
    answers: Sequence[bytes] = [b""] * world_size
    if not failures and reduce is not None:
        try:
            answers = reduce([message[1:] for message in messages])
            if len(answers) != world_size:
                raise CoordinationError(f"{step}: {len(answers)} answers for {world_size} ranks")
        except Exception as error:
            own = error
            failures[rank] = error_to_record(error)
    if failures:
        return [_FAILED + json.dumps(failures).encode()] * world_size, own
    return [_FINE + answer for answer in answers], None


def open_answer(step: str, answer: bytes, own: BaseException | None, rank: int) -> bytes:
    """What the coordinator answered.

    Raises:
        CheckpointException: some rank failed; ``own`` is this rank's error, if it did.
    """
    if answer[:1] == _FINE:
        return answer[1:]
    raise failure_of(step, json.loads(answer[1:]), own, rank)


def failure_of(
    step: str, records: dict[str, dict[str, Any]], own: BaseException | None, rank: int
) -> CheckpointException:
    """The joint error of the ranks in ``records``, without those that only followed another."""
    failures: Failures = {int(sender): error_from_record(r) for sender, r in records.items()}
    causes = {r: f for r, f in failures.items() if not isinstance(f[0], PeerFailedError)}
    failures = causes or failures
    if own is not None and rank in failures:
        failures[rank] = (own, traceback.extract_tb(own.__traceback__))
    joint = joint_error(step, failures, rank)
    assert isinstance(joint, CheckpointError)
    return joint
