"""The lock under which a commit record is replaced: a name that only one process can make.

A link tells whose it is from the moment it is there. The lock of a process that is gone is broken
by others; two that try at once exclude one another, so neither takes away what a third has taken.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator

from dcp_pipeline.core.errors import ConcurrentSaveError, StorageError
from dcp_pipeline.core.liveness import ProcessIdentity, forget, give_up, is_given_up
from dcp_pipeline.storage.changes import FileChanges, Opened, close_noted, open_noted

__all__ = ["LOCK", "CommitLock"]

LOCK = ".committing.lock"
_TIMEOUT = 30.0
_MAX_BYTES = 64 << 10
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

logger = logging.getLogger("dcp_pipeline")


class CommitLock:
    """The lock of one directory.

    Args:
        changes: what makes the changes to the file system.
        directory: where it lies.
        stale_after: seconds after which a lock of a process that cannot be looked at is dead.
        write: makes a new file with its content, where a file system has no links.

    Attributes:
        text: what tells this lock, and whose it is, from all others.
    """

    def __init__(
        self,
        changes: FileChanges,
        directory: str,
        stale_after: float,
        write: Callable[[str, bytes], None],
    ) -> None:
        self._changes = changes
        self._directory = directory
        self._path = os.path.join(directory, LOCK)
        self._stale_after = stale_after
        self._write = write
        self.text = ProcessIdentity.current().encode(nonce=os.urandom(8).hex())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            ConcurrentSaveError: another process holds it for long.
            OSError: it cannot be made.
        """
        # An interrupt may come where nobody can release it by hand.
        let_go = weakref.finalize(self, give_up, self.text.decode())
        let_go.atexit = False
        self._wait()
        try:
            yield
        finally:
            # First of all, so that one that stays for any reason is nobody's who is alive.
            let_go()
            self._release()

    def check(self) -> None:
        """Look once more before what cannot be taken back.

        Raises:
            ConcurrentSaveError: another process took this one for dead and broke its lock.
        """
        with contextlib.suppress(FileNotFoundError):
            if _text_of(self._path) == self.text:
                return
        raise ConcurrentSaveError(
            f"{self._path} was taken from this save: another process took it for dead"
        )

    def is_alive(self) -> bool:
        """Whether the owner of the lock may still be there; ``FileNotFoundError`` without one."""
        status = os.lstat(self._path)
        if stat.S_ISDIR(status.st_mode):
            return True  # nobody's who saves, and not ours to remove
        text = _text_of(self._path)
        holder = ProcessIdentity.parse(text)
        is_gone = is_given_up(os.fsdecode(text)) or (holder is not None and holder.is_gone())
        return not is_gone and time.time() - status.st_mtime < self._stale_after

    def description(self) -> str:
        """What is there under the lock's name; ``FileNotFoundError`` where nothing is."""
        status = os.lstat(self._path)
        if stat.S_ISDIR(status.st_mode):
            return "it is a directory, which no save makes: remove it by hand"
        text = _text_of(self._path)
        holder, age = ProcessIdentity.parse(text), time.time() - status.st_mtime
        if holder is not None:
            return f"process {holder.pid} on {holder.host} has held it for {age:.0f} s"
        is_file = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        what = f"a file of {len(text)} bytes" if is_file else "a pipe or a device"
        return (
            f"it is {what}, which does not say whose it is, {age:.0f} s old; it is removed"
            f" once it is {self._stale_after:.0f} s old (storage.stale_after_seconds)"
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                return self._take()
            except FileExistsError:
                if self._break():
                    continue
                if os.path.isdir(self._path) and not os.path.islink(self._path):
                    raise StorageError(
                        f"{self._path} is a directory, where a save makes its lock: remove it",
                        self._path,
                        errno.EISDIR,
                    ) from None
                if time.monotonic() > deadline:
                    raise ConcurrentSaveError(
                        f"another save is committing into {self._directory}: {self._path} is held"
                        + self._by_whom()
                    ) from None
                time.sleep(0.05)
            except BaseException:
                # It may have been taken all the same.
                self._give_back()
                raise

    def _by_whom(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return f": {self.description()}"
        return ""

    def _take(self) -> None:
        # A link appears together with its text: a process that is killed here never leaves a lock
        # that does not say whose it is.
        try:
            self._changes.symlink(self.text.decode(), self._path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._write(self._path, self.text)

    def _give_back(self) -> None:
        """Remove a lock that was taken although the file system reported an error."""
        give_up(self.text.decode())
        with contextlib.suppress(OSError):
            if _text_of(self._path) == self.text:
                self._changes.remove(self._path)

    def _release(self) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                # A lock that was broken is another's by now.
                if _text_of(self._path) == self.text:
                    self._changes.remove(self._path)
        except OSError as error:
            # What was done under it is done; whoever comes next breaks it.
            logger.warning("%s could not be removed: %s", self._path, error)
            return
        forget(self.text.decode())

    def _break(self) -> bool:
        """Remove the lock of a process that is gone; whether it is worth trying again at once."""
        with self._alone() as is_alone:
            try:
                if not is_alone or self.is_alive():
                    return False
                dead = _text_of(self._path)
                # Taken aside first: where nobody can be kept out, the rename decides who breaks it.
                aside = f"{self._path}.{os.urandom(4).hex()}.tmp"
                self._changes.replace(self._path, aside)
            except FileNotFoundError:
                return True
            with contextlib.suppress(FileNotFoundError):  # whoever has the lock tidies up too
                if _text_of(aside) != dead:
                    self._put_back(aside)
                self._changes.remove(aside)
            return True

    def _put_back(self, aside: str) -> None:
        """Undo a break that took a living lock; its owner looks again, and finds it or gives up."""
        with contextlib.suppress(FileExistsError):
            self._changes.link(aside, self._path)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other processes from breaking the lock; whether that is so, or cannot be had."""
        opened = Opened()
        try:
            open_noted(opened, self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(opened[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass  # no such locks on this file system
            yield True
        finally:
            close_noted(opened)


def _text_of(path: str) -> bytes:
    try:
        return os.fsencode(os.readlink(path))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return b""  # a pipe, whose opening would wait for somebody, or a device
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
