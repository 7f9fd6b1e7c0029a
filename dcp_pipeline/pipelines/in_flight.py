"""The asynchronous saves of a pipeline that are under way, and what became of them."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import Any

from dcp_pipeline.background.config import BackgroundConfig
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import BackgroundDiedError, ConcurrentSaveError, CoordinationError
from dcp_pipeline.types.exceptions import Failures, joint_error

__all__ = ["InFlight", "SaveFuture"]

logger = logging.getLogger("dcp_pipeline")


class SaveFuture(futures.Future[Any]):
    """A save under way; its result is what the save returns.

    Args:
        is_alone: whether there is one rank. Then whoever asks the future for its error has seen it,
            and no later call raises it again. With several, not all may have asked, and all have to
            raise at the same call.
    """

    def __init__(self, is_alone: bool = True) -> None:
        super().__init__()
        self.was_seen = False
        self._is_alone = is_alone
        self._runner: int | None = None

    def result(self, timeout: float | None = None) -> Any:
        try:
            return super().result(timeout)
        finally:
            self._note_seen()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self._note_seen()
        return error

    def _note_seen(self) -> None:
        # A callback runs in the background, where nobody sees what it reads.
        is_seen = self._is_alone and self.done()
        self.was_seen |= is_seen and threading.get_ident() != self._runner

    def error(self) -> BaseException | None:
        """Its error, once done, without being seen."""
        return super().exception(0)

    def run(self, save: Callable[[], Any], on_error: Callable[[BaseException], None]) -> None:
        """Set the result or the error to what ``save`` ends with; ``on_error`` hears first."""
        self._runner = threading.get_ident()
        try:
            result = save()
        except BaseException as error:
            # Its frames hold on to the snapshot, for as long as anybody holds the future.
            _forget_frames(error)
            on_error(error)
            self.set_exception(error)
        else:
            self.set_result(result)


class InFlight:
    """The saves that were not yet waited for, the oldest first.

    What one of them has raised is raised by the call that has to wait for it: then all ranks raise
    it at the same call, whichever rank is ahead.

    Args:
        settings: of the background.
    """

    def __init__(self, settings: BackgroundConfig) -> None:
        self._settings = settings
        self._saves: deque[SaveFuture] = deque()
        self._settled = 0
        self.failures = 0

    def add(self, save: SaveFuture) -> None:
        """One more is under way."""
        self._saves.append(save)

    def note(self, error: BaseException) -> None:
        """A save has failed; nobody may ever ask what became of it."""
        self.failures += 1
        log = logger.warning if self._settings.on_error == "warn" else logger.error
        log("a save in the background failed: %s", error)

    def make_room(self, coordinator: Callable[[], Coordinator]) -> bool:
        """Before a further save; whether it may be made.

        Args:
            coordinator: of the ranks, asked only where they have to agree.

        Raises:
            CheckpointException: an earlier save failed.
            ConcurrentSaveError: there is no room, and the settings say ``error``.
        """
        limit = self._settings.max_in_flight
        if self._settings.when_full == "wait":
            while len(self._saves) >= limit:
                self._settle_oldest()
            return True
        if self._under_way(coordinator()) < limit:
            return True
        if self._settings.when_full == "skip":
            logger.info("a save was left out: %d are under way", limit)
            return False
        raise ConcurrentSaveError(
            f"{limit} saves of this pipeline are still under way (background.max_in_flight), and"
            " background.when_full is 'error'"
        )

    def _under_way(self, coordinator: Coordinator) -> int:
        """How many saves some rank still works on; what failed anywhere is raised."""

        def most(messages: list[bytes]) -> list[bytes]:
            states = [json.loads(message) for message in messages]
            done = min(state["done"] for state in states)
            failed = min((f for state in states for f in state["failed"]), default=None)
            return [json.dumps({"done": done, "failed": failed}).encode()] * len(messages)

        state = json.loads(coordinator.exchange("in flight", self._state(), most))
        if state["failed"] is not None:
            self._settle_up_to(state["failed"])
        self._settle_up_to(state["done"] - 1)
        return self._settled + len(self._saves) - int(state["done"])

    def _state(self) -> bytes:
        done = self._settled
        for save in self._saves:
            if not save.done():
                break
            done += 1
        failed = [self._settled + place for place, save in enumerate(self._saves) if _is_news(save)]
        return json.dumps({"done": done, "failed": failed}).encode()

    def check(self, coordinator: Coordinator, problem: tuple[str, int | None] | None) -> None:
        """On all ranks together: raise what has failed so far on any of them, without waiting.

        Args:
            problem: what is wrong with this rank's background process, and its exit code.

        Raises:
            CheckpointException: a save failed, or a background process died.
        """

        def union(messages: list[bytes]) -> list[bytes]:
            states = [json.loads(message) for message in messages]
            failed = [number for state in states for number in state["failed"]]
            problems = {
                str(rank): state["problem"]
                for rank, state in enumerate(states)
                if state["problem"] is not None
            }
            answer = {"failed": max(failed, default=None), "problems": problems}
            return [json.dumps(answer).encode()] * len(messages)

        own = json.loads(self._state()) | {"problem": problem}
        answer = json.loads(coordinator.exchange("check", json.dumps(own).encode(), union))
        if answer["failed"] is not None:
            self._settle_up_to(answer["failed"])
        if answer["problems"] and self._settings.on_error == "raise":
            died: Failures = {
                int(rank): (BackgroundDiedError(text, code), traceback.StackSummary())
                for rank, (text, code) in answer["problems"].items()
            }
            raise joint_error("check", died, coordinator.rank)

    def _settle_up_to(self, number: int) -> None:
        """Settle the saves up to that number; the first of their errors is raised at the end."""
        first: BaseException | None = None
        while self._saves and self._settled <= number:
            try:
                self._settle_oldest()
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _settle_oldest(self) -> None:
        save = self._saves[0]
        futures.wait([save])
        self._saves.popleft()
        self._settled += 1
        error = save.error()
        if error is not None and not save.was_seen and self._settings.on_error == "raise":
            save.was_seen = True
            raise error

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is under way.

        Args:
            timeout: seconds in all, ``None`` for none.

        Raises:
            CheckpointException: the first error that nobody has seen.
            CoordinationError: they did not end in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = list(self._saves)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        _, unfinished = futures.wait(pending, left)
        if unfinished:
            raise CoordinationError(
                f"{len(unfinished)} saves in the background were still under way after"
                f" {timeout:g} s"
            )
        self._settle_up_to(self._settled + len(pending) - 1)

    def let_go(self, timeout: float) -> None:
        """Wait for what is under way while something else has gone wrong; nothing is raised."""
        with contextlib.suppress(Exception):
            self.wait(timeout)

    @property
    def is_idle(self) -> bool:
        """Whether every save has ended."""
        return all(save.done() for save in self._saves)


def _forget_frames(error: BaseException) -> None:
    """Drop the local variables behind an error and those that it came from."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            pending += [found.__cause__, found.__context__]


def _is_news(save: SaveFuture) -> bool:
    return save.done() and save.error() is not None and not save.was_seen
