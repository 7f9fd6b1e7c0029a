"""File changes that are counted one by one, and of which one, or all from one on, fail."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from dcp_pipeline.storage.changes import FileChanges

__all__ = ["SPACE_CODES", "TAKES_SPACE", "Fault", "FaultyChanges", "Made", "ShortWrites"]

Made = tuple[str, str]
"""Method and name of the file of a change, random parts left out."""

TAKES_SPACE = ("make_directory", "create", "reserve", "write", "symlink")
"""What fails on a disk that is full, and goes on failing; to remove files still works there."""


SPACE_CODES = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Fault:
    """Which changes fail, and how.

    Attributes:
        number: of the first change that fails, counted from 0.
        code: errno.
        is_done: whether the change is made all the same, as a reply that is lost on the network.
        lasting: methods that fail from then on; the rest fails once.
    """

    number: int
    code: int
    is_done: bool = False
    lasting: tuple[str, ...] = ()


class FaultyChanges(FileChanges):
    """Notes every change in ``made`` and fails where ``fault`` says.

    Args:
        act: called instead of raising, in the thread that makes the change.
    """

    def __init__(self, fault: Fault | None = None, act: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.made: list[Made] = []
        self.fault = fault
        self._act = act
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def change(self, method: str, path: str, action: Callable[[], Any]) -> Any:
        """Make one change, or fail."""
        name = re.sub(r"[0-9a-f]{32}|[0-9a-f]{8}", "*", os.path.basename(path))
        with self._lock:
            number = len(self.made)
            self.made.append((method, name))
        fault = self.fault
        if fault is None or not self._is_due(fault, number, method):
            return action()
        result = action() if fault.is_done else None
        if self._act is None:
            raise OSError(fault.code, os.strerror(fault.code))
        self._act()
        return result if fault.is_done else action()

    def _is_due(self, fault: Fault, number: int, method: str) -> bool:
        return number == fault.number or (number > fault.number and method in fault.lasting)

    def create(self, path: str, flags: int = 0) -> int:
        make = super().create
        opened: list[int] = []

        def action() -> int:
            opened.append(make(path, flags))
            return opened[0]

        try:
            descriptor: int = self.change("create", path, action)
        except BaseException:
            for lost in opened:
                os.close(lost)
            raise
        self._names[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        # A file is closed even where that reports an error.
        super().close(descriptor)
        self.change("close", self._names[descriptor], lambda: None)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        make = super().write
        path = self._names[descriptor]
        count: int = self.change("write", path, lambda: make(descriptor, buffers, offset))
        return count


class ShortWrites(FileChanges):
    """The system takes only a part of what every write gives it: a page, or one byte of less."""

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        real = os.pwritev

        def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            return real(descriptor, [buffers[0][: 4096 if len(buffers[0]) > 4096 else 1]], offset)

        with _PATCHING, patch.object(os, "pwritev", short):
            return super().write(descriptor, buffers, offset)


_PATCHING = threading.Lock()


def _on_descriptor(method: str) -> Any:
    def change(self: FaultyChanges, descriptor: int, *args: Any) -> Any:
        make = getattr(FileChanges, method)
        path = self._names[descriptor]
        return self.change(method, path, lambda: make(self, descriptor, *args))

    return change


def _on_path(method: str) -> Any:
    def change(self: FaultyChanges, *paths: str) -> Any:
        make = getattr(FileChanges, method)
        return self.change(method, paths[-1], lambda: make(self, *paths))

    return change


for _method in ("reserve", "truncate", "sync"):
    setattr(FaultyChanges, _method, _on_descriptor(_method))
for _method in ("make_directory", "replace", "symlink", "remove", "touch", "sync_directory"):
    setattr(FaultyChanges, _method, _on_path(_method))
