"""When a run is asked to end: by a signal on any rank, or by a callable."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

__all__ = ["StopRequests"]

logger = logging.getLogger("dcp_pipeline")


class StopRequests:
    """Notes that this process was asked to end.

    Args:
        names: of the signals that ask.
        grace_seconds: from a signal until the process is expected to be killed.
        is_asked: asks too; called at every look until it is true.
    """

    def __init__(
        self,
        names: Sequence[str],
        grace_seconds: float,
        is_asked: Callable[[], bool] | None = None,
    ) -> None:
        self._signals = [signal.Signals[name] for name in names]
        self._grace_seconds = grace_seconds
        self._is_asked = is_asked
        self._handler = self._note  # the same object each time, to tell it from another's
        self._previous: dict[signal.Signals, Any] = {}
        self._is_listening = False
        self._reason = ""
        self._since: float | None = None

    def listen(self) -> None:
        """Catch the signals from here on; again and again is as good as once."""
        if self._is_listening:
            return
        self._is_listening = True
        if threading.current_thread() is not threading.main_thread():
            if self._signals:
                names = ", ".join(wanted.name for wanted in self._signals)
                logger.warning("%s cannot be caught outside of the main thread", names)
            return
        for wanted in self._signals:
            self._previous[wanted] = signal.signal(wanted, self._handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Nothing else: whatever the process is doing goes on, a log's lock may be held. A second
        # signal changes nothing.
        if not self._reason:
            self._reason = signal.Signals(number).name
            self._since = time.monotonic()

    def reason(self) -> str:
        """Why this process is to end; empty where it is not."""
        if not self._reason and self._is_asked is not None and self._is_asked():
            self._reason = "should_stop"
            self._since = time.monotonic()
        return self._reason

    def seconds_left(self) -> float:
        """Of the grace period."""
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        return max(0.0, self._grace_seconds - waited)

    def restore(self) -> None:
        """Give the signals back to whoever had them before."""
        for wanted, previous in self._previous.items():
            # Only the main thread can; and what somebody else has set since is theirs.
            with contextlib.suppress(ValueError):
                if signal.getsignal(wanted) is self._handler:
                    signal.signal(wanted, signal.SIG_DFL if previous is None else previous)
        self._previous.clear()
