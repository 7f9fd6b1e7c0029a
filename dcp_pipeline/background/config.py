"""Configs of the backgrounds, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from dcp_pipeline.core.kind import KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.background.base import ProcessBackground, ThreadBackground

__all__ = ["BackgroundConfig", "ProcessBackgroundConfig", "ThreadBackgroundConfig"]


class BackgroundConfig(KindConfig):
    """What every kind has in common.

    Attributes:
        max_in_flight: saves that may be under way at a time; each holds a snapshot.
        when_full: what a further one does: ``wait`` for the oldest, be left out (``skip``), or
            raise an ``error``; the last two cost the ranks a message per save.
        on_error: whether the next call ``raise``s what went wrong in the background, or the log
            only ``warn``s of it.
        retries: how often a save that failed is tried again, with the same snapshot.
        close_timeout_seconds: how long closing waits for saves under way.
        nice: added to the priority number of background threads, 0 to 19.
        io_priority: ``idle``, or ``low`` for the last of the normal levels; Linux only.
    """

    max_in_flight: int = Field(default=1, ge=1)
    when_full: Literal["wait", "skip", "error"] = "wait"
    on_error: Literal["raise", "warn"] = "raise"
    retries: int = Field(default=0, ge=0)
    close_timeout_seconds: float = Field(default=600.0, ge=0, allow_inf_nan=False)
    nice: int = Field(default=0, ge=0, le=19)
    io_priority: Literal["idle", "low"] | None = None


class ThreadBackgroundConfig(BackgroundConfig):
    """Asynchronous saves run in a thread of the training process."""

    kind: Literal["thread"] = "thread"

    def build(self) -> ThreadBackground:
        """Make the background."""
        from dcp_pipeline.background.base import ThreadBackground

        return ThreadBackground(self)


class ProcessBackgroundConfig(BackgroundConfig):
    """Asynchronous saves run in a process beside every rank, apart from the training's interpreter.

    Attributes:
        start_timeout_seconds: how long a process may take to start.
    """

    works_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"stager": ("inplace", "shared")}

    kind: Literal["process"] = "process"
    start_timeout_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)

    def build(self) -> ProcessBackground:
        """Make the background."""
        from dcp_pipeline.background.base import ProcessBackground

        return ProcessBackground(self, self.start_timeout_seconds)
