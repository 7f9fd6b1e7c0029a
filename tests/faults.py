"""A storage that fails, or ends its process, at a chosen change to the file system.

It is registered as a kind, so that a test names it in a config, as a plain mapping::

    {"storage": {"kind": "faulty", "method": "sync", "names": "*.distcp", "on_rank": 1}}
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, ClassVar, Literal

import torch.distributed as dist

from dcp_pipeline.core.registry import register
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.config import FileSystemConfig
from dcp_pipeline.storage.filesystem import FileSystemStorage

__all__ = ["FaultyChanges", "FaultyConfig"]


class FaultyConfig(FileSystemConfig):
    """Fails once ``skip`` changes that match have gone well, and at every later one.

    Attributes:
        method: of :class:`FileChanges`, or ``*``.
        names: glob on the name of the file that is changed.
        skip: matching changes that go well first.
        on_rank: where; ``None`` for everywhere.
        when: before the change, halfway (of a write), or after it.
        code: errno to raise; 0 ends the process with exit code 9.
    """

    kind: Literal["faulty"] = "faulty"  # type: ignore[assignment]
    method: str = "write"
    names: str = "*"
    skip: int = 0
    on_rank: int | None = None
    when: Literal["before", "halfway", "after"] = "before"
    code: int = errno.ENOSPC

    def build(self) -> FileSystemStorage:
        rank = dist.get_rank() if dist.is_initialized() else 0
        is_here = self.on_rank in (None, rank)
        return FileSystemStorage(
            thread_count=self.thread_count,
            sync_files=self.sync_files,
            direct_io=self.direct_io,
            reserve_space=self.reserve_space,
            buffer_bytes=self.buffer_bytes,
            changes=FaultyChanges(self) if is_here else None,
        )


class FaultyChanges(FileChanges):
    """Every method is the real one but for the fault; ``made`` lists all changes."""

    last: ClassVar[FaultyChanges | None] = None

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__()
        self.made: list[tuple[str, str]] = []
        self._config = config
        self._left = config.skip
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        FaultyChanges.last = self

    def create(self, path: str, flags: int = 0) -> int:
        descriptor = self._change("create", path, super().create, path, flags)
        self._names[descriptor] = path
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_due("write", self._names[descriptor]):
            if self._config.when != "before":
                whole = buffers if self._config.when == "after" else _half(buffers)
                super().write(descriptor, whole, offset)
            self._fail(self._names[descriptor])
        return super().write(descriptor, buffers, offset)

    def _change(self, method: str, path: str, action: Any, *args: Any) -> Any:
        is_due = self._is_due(method, path)
        if is_due and self._config.when != "after":
            self._fail(path)
        result = action(*args)
        if is_due:
            self._fail(path)
        return result

    def _is_due(self, method: str, path: str) -> bool:
        name = os.path.basename(path)
        with self._lock:
            self.made.append((method, name))
            matches = self._config.method in ("*", method) and fnmatch(name, self._config.names)
            self._left -= matches
            return matches and self._left < 0

    def _fail(self, path: str) -> None:
        if not self._config.code:
            os._exit(9)
        raise OSError(self._config.code, os.strerror(self._config.code), path)


def _half(buffers: Sequence[memoryview]) -> list[memoryview]:
    whole = b"".join(buffers)
    # Whole pages, so that it can be written past the page cache too.
    half = len(whole) // 2 // 4096 * 4096
    return [memoryview(whole)[:half]]


def _on_descriptor(method: str) -> Any:
    def change(self: FaultyChanges, descriptor: int, *args: Any) -> Any:
        real = getattr(super(FaultyChanges, self), method)
        return self._change(method, self._names[descriptor], real, descriptor, *args)

    return change


def _on_path(method: str) -> Any:
    def change(self: FaultyChanges, *paths: str) -> Any:
        real = getattr(super(FaultyChanges, self), method)
        return self._change(method, paths[-1], real, *paths)

    return change


for _method in ("reserve", "truncate", "sync", "close"):
    setattr(FaultyChanges, _method, _on_descriptor(_method))
for _method in ("make_directory", "replace", "symlink", "remove", "touch", "sync_directory"):
    setattr(FaultyChanges, _method, _on_path(_method))

register("storage", "faulty", FaultyConfig)
