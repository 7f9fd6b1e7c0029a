"""Every change this package makes to a file system, one method each.

Nothing else in the package creates, writes, syncs, renames or removes a file. A test hands in a
subclass that stops before, after or halfway through each of them; see ``tests/crash``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["FileChanges", "Opened", "close_noted", "open_noted"]

_IOV_MAX = 1024


def _load_fallocate() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    # Not by find_library, which starts processes to look for what is loaded already.
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


class Opened(list[int]):
    """Descriptors that are closed with the last one who could have closed them."""

    def __del__(self) -> None:
        close_noted(self)


def open_noted(opened: list[int], path: str, flags: int, mode: int = 0o777) -> None:
    """As ``os.open``, and appends the descriptor: it is never open without being noted."""
    # No byte code runs between the system call and the note, so no interrupt comes there.
    opened.extend(map(os.open, (path,), (flags | os.O_CLOEXEC,), (mode,)))


def close_noted(opened: list[int], close: Callable[[int], Any] = os.close) -> None:
    """Close what is noted, which is then not noted any more."""
    any(map(close, map(opened.pop, (-1,) * len(opened))))


class FileChanges:
    """The real thing: each method makes its change and returns when the system call does."""

    def __init__(self) -> None:
        # posix_fallocate writes zeros where the file system cannot reserve; fallocate refuses.
        self._fallocate = _load_fallocate()

    def make_directories(self, path: str) -> None:
        """Make ``path`` and its parents where they are missing, and make each new entry durable."""
        missing = []
        current = os.path.abspath(path)
        while not os.path.isdir(current):
            missing.append(current)
            current = os.path.dirname(current)
        with contextlib.suppress(PermissionError):
            # It may have been made by a process that ended before this.
            self.sync_directory(os.path.dirname(current))
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self.make_directory(directory)
            self.sync_directory(os.path.dirname(directory))

    def make_directory(self, path: str) -> None:
        """Make one directory; ``FileExistsError`` if the name is taken."""
        os.mkdir(path)

    def create(self, path: str, flags: int = 0) -> int:
        """A file descriptor of a new file; ``FileExistsError`` if the name is taken."""
        opened: list[int] = []
        try:
            open_noted(opened, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | flags, 0o644)
            return opened[0]
        except BaseException:
            close_noted(opened)
            raise

    def open_shared(self, path: str, flags: int = 0) -> int:
        """A file descriptor of a file that several processes write, made where it is not there."""
        opened: list[int] = []
        try:
            open_noted(opened, path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | flags, 0o644)
            return opened[0]
        except BaseException:
            close_noted(opened)
            raise

    def reserve(self, descriptor: int, size: int) -> bool:
        """Reserve room for ``size`` bytes; whether the file system can do so at all."""
        if self._fallocate is None or size == 0:
            return False
        if self._fallocate(descriptor, 0, 0, size) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise OSError(code, os.strerror(code))

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write all of ``buffers`` at ``offset``; the number of bytes."""
        pending = [buffer for buffer in buffers if len(buffer)]
        written = 0
        while pending:
            count = os.pwritev(descriptor, pending[:_IOV_MAX], offset + written)
            if count == 0:
                raise OSError(errno.EIO, "the system wrote nothing")
            written += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]
        return written

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut the file to ``size`` bytes."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Make a file's bytes durable."""
        os.fsync(descriptor)

    close = staticmethod(os.close)
    """Close a file; on network file systems this reports write errors.

    No function of Python's own: an interrupt comes before it or behind it.
    """

    def replace(self, source: str, target: str) -> None:
        """Give ``source`` the name ``target`` in one atomic step."""
        os.replace(source, target)

    def symlink(self, text: str, path: str) -> None:
        """Make ``path`` a symbolic link to ``text``; ``FileExistsError`` if the name is taken.

        Unlike a file it is never there without its content.
        """
        os.symlink(text, path)

    def link(self, source: str, target: str) -> None:
        """A further name of a file or a link; ``FileExistsError`` if the name is taken."""
        os.link(source, target, follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Remove a file; ``FileNotFoundError`` if it is not there."""
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it, file by file; links are not followed.

        What another process removes meanwhile is no error.
        """
        if os.path.islink(path):
            raise OSError(errno.ENOTDIR, "a link, not a directory", path)
        for directory, folders, files in os.walk(path, topdown=False):
            links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
            for name in (*files, *links):
                with contextlib.suppress(FileNotFoundError):
                    self.remove(os.path.join(directory, name))
            with contextlib.suppress(FileNotFoundError):
                self.remove_directory(directory)

    def touch(self, path: str) -> None:
        """Set a file's modification time to now."""
        os.utime(path)

    def sync_directory(self, path: str) -> None:
        """Make the entries of a directory durable."""
        opened = Opened()
        try:
            open_noted(opened, path, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(opened[0])
        except OSError as error:
            # Some file systems cannot sync a directory and do not need to.
            if not opened or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise
        finally:
            close_noted(opened)
