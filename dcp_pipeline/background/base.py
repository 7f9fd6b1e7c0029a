"""Where asynchronous saves run: the interface of a kind of background."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from dcp_pipeline.background.worker import Worker

__all__ = ["Background", "ProcessBackground", "Settings", "ThreadBackground"]


@dataclass(frozen=True)
class Settings:
    """How asynchronous saves behave; the fields of every kind's config.

    Attributes:
        max_in_flight, when_full, on_error, retries, close_timeout_seconds, nice, io_priority: see
            the config of the kind.
    """

    max_in_flight: int = 1
    when_full: str = "wait"
    on_error: str = "raise"
    retries: int = 0
    close_timeout_seconds: float = 600.0
    nice: int = 0
    io_priority: str | None = None


class Background(ABC):
    """A kind of background.

    Attributes:
        is_process: whether saves run in a process of their own.
        settings: how they behave.
    """

    is_process: ClassVar[bool]

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()


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

    def __init__(
        self, settings: Settings | None = None, start_timeout_seconds: float = 120.0
    ) -> None:
        super().__init__(settings)
        self.start_timeout_seconds = start_timeout_seconds

    def worker(self, target: Any, *arguments: Any) -> Worker:
        """Start a process that answers requests with what ``target(*arguments)`` makes of them."""
        return Worker(
            target, arguments, self.start_timeout_seconds,
            nice=self.settings.nice, io_priority=self.settings.io_priority,
        )  # fmt: skip
