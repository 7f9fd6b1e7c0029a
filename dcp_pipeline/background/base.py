"""Where asynchronous saves run: the interface of a kind of background."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar

from dcp_pipeline.background.config import BackgroundConfig
from dcp_pipeline.background.worker import Worker

__all__ = ["Background", "ProcessBackground", "ThreadBackground"]


class Background(ABC):
    """A kind of background.

    Attributes:
        is_process: whether saves run in a process of their own.
        settings: how they behave.
    """

    is_process: ClassVar[bool]

    def __init__(self, settings: BackgroundConfig) -> None:
        self.settings = settings


class ThreadBackground(Background):
    """A thread of this process. It shares the interpreter with training, and needs no warm-up."""

    is_process: ClassVar[bool] = False


class ProcessBackground(Background):
    """A process beside every rank, which lives across saves.

    Args:
        settings: how saves behave.
        start_timeout_seconds: after which a process that does not come up is given up.
    """

    is_process: ClassVar[bool] = True

    def __init__(self, settings: BackgroundConfig, start_timeout_seconds: float) -> None:
        super().__init__(settings)
        self.start_timeout_seconds = start_timeout_seconds

    def worker(self, target: Any, *arguments: Any) -> Worker:
        """Start a process that answers requests with what ``target(*arguments)`` makes of them."""
        return Worker(
            target, arguments, self.start_timeout_seconds,
            nice=self.settings.nice, io_priority=self.settings.io_priority,
        )  # fmt: skip
