"""Changes that are written down as they are made, by one process or by several.

Nothing is synced for real: that a sync was asked for is all that matters here.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dcp_pipeline.storage.changes import FileChanges
from tests.crash.changes import kill
from tests.crash.power import Change

__all__ = ["RecordingChanges", "read_log"]


class RecordingChanges(FileChanges):
    """Makes every change and appends it to a log once it is made.

    A change that another rank only makes because of this one comes later in the log.

    Args:
        log: the file, shared by all ranks.
        root: the directory that paths are relative to.
        stop_after: changes after which the process is killed.
    """

    def __init__(self, log: Path, root: Path, stop_after: int = -1) -> None:
        super().__init__()
        self._left = stop_after
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._root = os.fspath(root)
        self._files: dict[int, int] = {}
        self._made = 0

    def _below(self, path: str) -> str:
        return os.path.relpath(path, self._root).removeprefix(".").removeprefix("/")

    def _note(self, change: Change) -> None:
        fcntl.flock(self._log, fcntl.LOCK_EX)
        os.write(self._log, json.dumps(change.encode()).encode() + b"\n")
        fcntl.flock(self._log, fcntl.LOCK_UN)
        self._left -= 1
        if not self._left:
            kill()

    def make_directory(self, path: str) -> None:
        super().make_directory(path)
        self._note(Change("mkdir", self._below(path)))

    def create(self, path: str, flags: int = 0) -> int:
        descriptor = super().create(path, flags)
        # Not the number of its inode, which another file has soon after this one is gone.
        self._made += 1
        self._files[descriptor] = os.getpid() * 10_000 + self._made
        self._note(Change("create", self._below(path), self._files[descriptor]))
        return descriptor

    def reserve(self, descriptor: int, size: int) -> bool:
        is_done = super().reserve(descriptor, size)
        if is_done:
            self._note(Change("reserve", file=self._files[descriptor], offset=size))
        return is_done

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().write(descriptor, buffers, offset)
        data = b"".join(buffers)
        self._note(Change("write", file=self._files[descriptor], offset=offset, data=data))
        return count

    def truncate(self, descriptor: int, size: int) -> None:
        super().truncate(descriptor, size)
        self._note(Change("truncate", file=self._files[descriptor], offset=size))

    def sync(self, descriptor: int) -> None:
        self._note(Change("sync", file=self._files[descriptor]))

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        self._note(Change("replace", self._below(target), source=self._below(source)))

    def symlink(self, text: str, path: str) -> None:
        super().symlink(text, path)
        self._note(Change("symlink", self._below(path), data=text.encode()))

    def remove(self, path: str) -> None:
        super().remove(path)
        self._note(Change("remove", self._below(path)))

    def sync_directory(self, path: str) -> None:
        if os.path.commonpath([path, self._root]) == self._root:
            self._note(Change("sync_directory", self._below(path)))


class WithoutSync(RecordingChanges):
    """Forgets to make files durable."""

    def sync(self, descriptor: int) -> None:
        return None


class WithoutDirectorySync(RecordingChanges):
    """Forgets to make names durable."""

    def sync_directory(self, path: str) -> None:
        return None


class FailingDirectorySync(RecordingChanges):
    """The disk reports an error when the names are synced, from the commit record's on."""

    has_committed = False

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        self.has_committed |= os.path.basename(target) == "manifest.json"

    def sync_directory(self, path: str) -> None:
        if self.has_committed:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().sync_directory(path)


class FailingLastSync(RecordingChanges):
    """As :class:`FailingDirectorySync`, from the sync on that follows the commit record's."""

    has_replaced = False

    def replace(self, source: str, target: str) -> None:
        super().replace(source, target)
        self.has_replaced |= os.path.basename(target) == ".metadata"

    def sync_directory(self, path: str) -> None:
        if self.has_replaced:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        super().sync_directory(path)


def read_log(log: Path) -> list[Change]:
    """The changes in a log, in order."""
    return [Change.decode(json.loads(line)) for line in log.read_text().splitlines()]
