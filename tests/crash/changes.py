"""File changes that are counted one by one, and that stop at a chosen one.

A process that is killed does not lose what it wrote: only a loss of power does. So nothing is
synced here, which makes hundreds of kills affordable; ``test_power.py`` is about the syncs.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from dcp_pipeline.storage.changes import FileChanges

__all__ = ["HALVED", "CountedChanges", "Made", "Stop", "UnsyncedChanges", "kill", "readable"]

HALVED = ("reserve", "write")
"""The changes that can be found half made; each other one is a single step of the file system."""

Made = tuple[str, str]
"""Method and file name of a change."""


@dataclass(frozen=True)
class Stop:
    """Where a process ends: at the ``number``-th change, counted from 0."""

    number: int
    when: Literal["before", "halfway", "after"]


def kill() -> NoReturn:
    """End this process at once; nothing is cleaned up or flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def readable(name: str) -> str:
    """A file's name with the random part left out."""
    return re.sub(r"[0-9a-f]{32}|[0-9a-f]{8}", "*", name)


class UnsyncedChanges(FileChanges):
    """Makes every change, and none of it durable."""

    def sync(self, descriptor: int) -> None:
        return None

    def sync_directory(self, path: str) -> None:
        return None


class CountedChanges(FileChanges):
    """Notes every change in ``made``, and calls ``end`` at the one that ``stop`` names.

    Args:
        stop: where to end; ``None`` for nowhere.
        end: how.
        syncs: whether to make anything durable.
    """

    def __init__(
        self, stop: Stop | None = None, end: Callable[[], Any] = kill, syncs: bool = False
    ) -> None:
        super().__init__()
        self._syncs = syncs
        self.made: list[Made] = []
        self._stop = stop
        self._end = end
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def _change(
        self,
        method: str,
        path: str,
        action: Callable[[], Any],
        half: Callable[[], Any] | None = None,
    ) -> Any:
        with self._lock:
            number = len(self.made)
            self.made.append((method, readable(os.path.basename(path))))
        when = self._stop.when if self._stop and self._stop.number == number else None
        if when == "before":
            self._end()
        if when == "halfway" and half is not None:
            half()
            self._end()
        try:
            return action()
        finally:
            if when == "after":
                self._end()

    def make_directory(self, path: str) -> None:
        make = super().make_directory
        self._change("make_directory", path, lambda: make(path))

    def create(self, path: str, flags: int = 0) -> int:
        make = super().create
        descriptor: int = self._change("create", path, lambda: make(path, flags))
        self._names[descriptor] = path
        return descriptor

    def open_shared(self, path: str, flags: int = 0) -> int:
        make = super().open_shared
        descriptor: int = self._change("open_shared", path, lambda: make(path, flags))
        self._names[descriptor] = path
        return descriptor

    def reserve(self, descriptor: int, size: int) -> bool:
        make = super().reserve
        done: bool = self._change(
            "reserve",
            self._names[descriptor],
            lambda: make(descriptor, size),
            lambda: make(descriptor, max(1, size // 2)),
        )
        return done

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        make = super().write

        def half() -> None:
            # Not in whole pages: the page cache has to take it.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))
            whole = b"".join(buffers)
            make(descriptor, [memoryview(whole)[: len(whole) // 2]], offset)

        count: int = self._change(
            "write", self._names[descriptor], lambda: make(descriptor, buffers, offset), half
        )
        return count

    def truncate(self, descriptor: int, size: int) -> None:
        make = super().truncate
        self._change("truncate", self._names[descriptor], lambda: make(descriptor, size))

    def sync(self, descriptor: int) -> None:
        make = super().sync if self._syncs else UnsyncedChanges().sync
        self._change("sync", self._names[descriptor], lambda: make(descriptor))

    def close(self, descriptor: int) -> None:
        make = super().close
        self._change("close", self._names.pop(descriptor), lambda: make(descriptor))

    def replace(self, source: str, target: str) -> None:
        make = super().replace
        self._change("replace", target, lambda: make(source, target))

    def symlink(self, text: str, path: str) -> None:
        make = super().symlink
        self._change("symlink", path, lambda: make(text, path))

    def remove(self, path: str) -> None:
        make = super().remove
        self._change("remove", path, lambda: make(path))

    def remove_directory(self, path: str) -> None:
        make = super().remove_directory
        self._change("remove_directory", path, lambda: make(path))

    def touch(self, path: str) -> None:
        make = super().touch
        self._change("touch", path, lambda: make(path))

    def sync_directory(self, path: str) -> None:
        make = super().sync_directory if self._syncs else UnsyncedChanges().sync_directory
        self._change("sync_directory", path, lambda: make(path))
