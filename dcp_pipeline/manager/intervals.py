"""When it is time to save."""

from __future__ import annotations

import time

__all__ = ["Intervals"]


class Intervals:
    """Intervals in steps and in minutes; either makes a save due.

    Args:
        every_steps: steps divisible by it are due; ``None`` for none.
        every_minutes: since the last save began, or since this was made; ``None`` for never.
    """

    def __init__(self, every_steps: int | None, every_minutes: float | None) -> None:
        self._every_steps = every_steps
        self._every_seconds = None if every_minutes is None else every_minutes * 60
        self._since = time.monotonic()

    @property
    def has_minutes(self) -> bool:
        """Whether a clock has a say, so that one rank has to decide."""
        return self._every_seconds is not None

    def is_due_by_step(self, step: int) -> bool:
        """Whether the step itself is one to save at; the same on every rank."""
        return self._every_steps is not None and step % self._every_steps == 0

    def is_due_by_time(self) -> bool:
        """Whether this rank's clock says that it is time."""
        passed = time.monotonic() - self._since
        return self._every_seconds is not None and passed >= self._every_seconds

    def begin(self) -> None:
        """A save begins now."""
        self._since = time.monotonic()
