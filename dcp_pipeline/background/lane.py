"""Work in the background, one after another: a thread per piece, each behind the one before it.

All ranks start the same work in the same order, so what the ranks agree on in it fits together.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from dcp_pipeline.background.priority import lower_priority

__all__ = ["Lane", "close_at_exit", "lane_of"]

logger = logging.getLogger("dcp_pipeline")


class Lane:
    """A chain of work; the next begins when the one before has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: threading.Event | None = None

    def start(
        self, work: Callable[[], None], nice: int = 0, io_priority: str | None = None
    ) -> None:
        """Run ``work``, which raises nothing, behind all that was started here before."""
        done = threading.Event()
        with self._lock:
            before, self._last = self._last, done

        def run() -> None:
            try:
                if before is not None:
                    before.wait()
                lower_priority(nice, io_priority)
                work()
            finally:
                done.set()

        # Not a daemon's end in the middle of a write, and not an end that waits for ever either:
        # see _wait_at_exit.
        threading.Thread(target=run, name="dcp_pipeline background", daemon=True).start()


_LANES: weakref.WeakKeyDictionary[object, Lane] = weakref.WeakKeyDictionary()
_LANES_LOCK = threading.Lock()


def lane_of(key: object) -> Lane:
    """The lane that belongs to ``key``, for as long as that lives."""
    with _LANES_LOCK:
        return _LANES.setdefault(key, Lane())


_OPEN: weakref.WeakSet[Closing] = weakref.WeakSet()


class Closing(Protocol):
    """What has to be closed before the program ends."""

    def close(self) -> None:
        """Wait for what is under way, and give everything back."""


def close_at_exit(user: Closing) -> None:
    """Close ``user`` when the program ends, unless it is gone by then."""
    _OPEN.add(user)


def _wait_at_exit() -> None:
    for user in list(_OPEN):
        try:
            user.close()
        except Exception:
            logger.exception("a background save failed, or was not done when the program ended")


# Before the interpreter refuses new threads, which the writes need; atexit would come too late.
getattr(threading, "_register_atexit", atexit.register)(_wait_at_exit)
