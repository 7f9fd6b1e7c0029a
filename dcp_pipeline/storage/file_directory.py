"""One directory of a POSIX file system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dcp_pipeline.core.errors import (
    ConcurrentSaveError,
    MissingFileError,
    StorageError,
    UnsafeCheckpointError,
)
from dcp_pipeline.core.manifest import safe_name, safe_relative_name
from dcp_pipeline.storage.base import Directory, Observer, RangeWriter, Segments, Source
from dcp_pipeline.storage.changes import close_noted, open_noted
from dcp_pipeline.storage.commit_lock import LOCK, CommitLock
from dcp_pipeline.storage.file_source import FileSource
from dcp_pipeline.storage.file_writer import BufferPool, stream_to_file
from dcp_pipeline.storage.range_writer import FileRanges
from dcp_pipeline.storage.system_errors import system_error

if TYPE_CHECKING:
    from dcp_pipeline.storage.filesystem import FileSystemStorage

__all__ = ["FileSystemDirectory"]

_ATTEMPTS = 2
_SMALL_BYTES = 1 << 20
# Opening a pipe would wait for somebody to write into it.
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class FileSystemDirectory(Directory):
    """One directory; see :class:`Directory` for what each method promises."""

    def __init__(self, storage: FileSystemStorage, path: str, follow_links: bool = False) -> None:
        self.location = path
        self._storage = storage
        self._follow_links = follow_links
        self._changes = storage.changes

    def prepare(self) -> None:
        with self._system_errors(self.location):
            self._changes.make_directories(self.location)

    def names(self) -> list[str]:
        return self._listed(self.location)

    def names_below(self, folder: str) -> list[str]:
        path = self._inside(f"{folder}/any")
        return [f"{folder}/{name}" for name in self._listed(os.path.dirname(path))]

    def _listed(self, path: str) -> list[str]:
        try:
            with self._system_errors(path):
                return sorted(os.listdir(path))
        except MissingFileError:
            return []
        except StorageError as error:
            if error.errno == errno.ENOTDIR:
                return []
            raise

    def exists(self, name: str) -> bool:
        return os.path.lexists(self._inside(name))

    def read(self, name: str, start: int = 0, limit: int | None = None) -> bytes:
        with self._open(name) as source:
            begin = max(source.size + start, 0) if start < 0 else min(start, source.size)
            count = source.size - begin if limit is None else min(limit, source.size - begin)
            if count > _SMALL_BYTES:
                source.check_dense()
            try:
                data = bytearray(count)
                source.read_into(begin, memoryview(data))
                return bytes(data)
            except MemoryError:
                raise UnsafeCheckpointError(
                    f"{self._inside(name)} has {source.size} bytes, more than there is memory for"
                ) from None

    def size(self, name: str) -> int:
        path = self._inside(name)
        with self._system_errors(path):
            return os.stat(path).st_size

    def open(self, name: str) -> Source:
        return self._open(name)

    def _open(self, name: str) -> FileSource:
        path = self._inside(name)
        opened: list[int] = []
        try:
            with self._system_errors(path):
                self._open_into(opened, path)
            if not stat.S_ISREG(os.fstat(opened[0]).st_mode):
                raise UnsafeCheckpointError(
                    f"{path} is no file but a directory, a pipe or a device"
                )
            return FileSource(self.location, name, opened)
        except BaseException:
            close_noted(opened)
            raise

    def _open_into(self, opened: list[int], path: str) -> None:
        try:
            open_noted(opened, path, _READ_ONLY)
        except OSError as error:
            if error.errno == errno.ESTALE:
                open_noted(opened, path, _READ_ONLY)
            elif error.errno == errno.ELOOP:
                open_noted(opened, self._target_of(path), _READ_ONLY)
            else:
                raise

    def _inside(self, name: str) -> str:
        """The path of a file to be read; folders above it must not be links that lead out."""
        path = os.path.join(self.location, safe_relative_name(name))
        if "/" in name:
            self._target_of(os.path.dirname(path))
        return path

    def _target_of(self, path: str) -> str:
        target, root = os.path.realpath(path), os.path.realpath(self.location)
        if not self._follow_links and os.path.commonpath([target, root]) != root:
            raise UnsafeCheckpointError(
                f"{path} is a link that leads out of the checkpoint: {target}"
            )
        return target

    def write(
        self, name: str, size: int, segments: Segments, observe: Observer, block_bytes: int
    ) -> None:
        storage, path = self._storage, self._path(name)
        pool = storage.buffers
        if pool.nbytes % block_bytes:
            pool = BufferPool(max(block_bytes, pool.nbytes // block_bytes * block_bytes))
        buffer = pool.acquire()
        try:
            with self._system_errors(path, size):
                stream_to_file(
                    self._changes,
                    path,
                    size,
                    segments,
                    observe,
                    buffer,
                    direct=storage.direct_io,
                    reserve=storage.reserve_space,
                    sync=storage.sync_files,
                )
        finally:
            pool.release(buffer)

    def open_ranges(self, name: str, size: int) -> RangeWriter:
        storage, path = self._storage, self._path(name)
        with self._system_errors(path, size):
            return FileRanges(
                self._changes,
                path,
                size,
                storage.buffers if storage.direct_io else None,
                self._system_errors,
                reserve=storage.reserve_space,
                sync=storage.sync_files,
            )

    def put(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._system_errors(path, len(data)):
            self._write_small(path, data)

    def put_whole(self, name: str, data: bytes) -> None:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(MissingFileError):
                return self._replace(name, data)
        self._replace(name, data)

    def _write_small(self, path: str, data: bytes) -> None:
        opened: list[int] = []
        try:
            opened.append(self._changes.create(path))
            self._changes.write(opened[0], [memoryview(data)], 0)
            if self._storage.sync_files:
                self._changes.sync(opened[0])
            close_noted(opened, self._changes.close)
        except BaseException:
            close_noted(opened)
            raise

    def sync(self) -> None:
        if self._storage.sync_files:
            with self._system_errors(self.location):
                self._changes.sync_directory(self.location)

    def renew(self, name: str) -> None:
        with self._system_errors(self._path(name)):
            self._changes.touch(self._path(name))

    def age(self, name: str) -> float:
        with self._system_errors(self._path(name)):
            return max(0.0, time.time() - os.stat(self._path(name)).st_mtime)

    def commit(
        self,
        name: str,
        data: bytes,
        expected: bytes | None,
        also: Sequence[tuple[str, bytes | None]],
    ) -> None:
        with self._locked() as lock:
            found = self.read(name) if self.exists(name) else None
            if found != expected:
                raise ConcurrentSaveError(
                    f"{self._path(name)} was changed while this save was under way: another job"
                    " saves into the same checkpoint. What this save wrote is not part of it"
                )
            self._remove_temporaries([LOCK, name, *(other for other, _ in also)])
            lock.check()
            self._replace(name, data)
            # The others may only be on the disk once the record is: it names what it supersedes.
            self.sync()
            for other, content in also:
                if content is not None:
                    self._replace(other, content)
                elif self.exists(other):
                    self.delete([other])
            self.sync()

    def token(self, name: str) -> str | None:
        try:
            with self._system_errors(self._path(name)):
                found = os.stat(self._path(name), follow_symlinks=False)
        except MissingFileError:
            return None
        return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"

    def adopt(
        self,
        files: Sequence[tuple[str, str]],
        record: tuple[str, bytes] | None,
        removed: Sequence[str],
        expected: Mapping[str, str | None],
    ) -> None:
        with self._locked() as lock:
            changed = [name for name, token in expected.items() if self.token(name) != token]
            if changed:
                raise ConcurrentSaveError(
                    f"{self._path(changed[0])} was changed while this save was under way: another"
                    " job saves into the same place. What this save wrote is not part of it"
                )
            self._remove_temporaries([LOCK, *([record[0]] if record else [])])
            lock.check()
            for name, final in files:
                with self._system_errors(self._path(final)):
                    self._changes.replace(self._path(name), self._path(final))
            # The record may only be on the disk once what it names is.
            self.sync()
            if record is not None:
                self._replace(*record)
                self.sync()
            if removed:
                self.delete(removed)
                self.sync()

    def _remove_temporaries(self, names: Iterable[str]) -> None:
        """What a process has left that was killed while it replaced a file or broke a lock."""
        stems = {f".{name.lstrip('.')}" for name in names}
        self.delete(filter(partial(self._is_temporary, stems), self.names()))

    def _is_temporary(self, stems: set[str], name: str) -> bool:
        path = self._path(name)
        return _stem(name) in stems and (os.path.islink(path) or not os.path.isdir(path))

    def stale_helpers(self, names: Sequence[str]) -> list[str]:
        """What a process has left that was killed while it replaced a file of ``names``.

        The lock and temporary files; none while a live process holds the lock.
        """
        stems = {f".{name.lstrip('.')}" for name in (*names, LOCK)}
        found = self.names()
        with contextlib.suppress(FileNotFoundError):
            if LOCK in found and self._lock().is_alive():
                return []
        return [name for name in found if name == LOCK or self._is_temporary(stems, name)]

    def held_lock(self) -> str | None:
        """Whose lock is there, or what is there instead, where it is not to be removed."""
        with contextlib.suppress(FileNotFoundError), self._system_errors(self._path(LOCK)):
            if self._lock().is_alive():
                return self._lock().description()
        return None

    def remove_stale_helpers(self, names: Sequence[str]) -> None:
        """Remove what :meth:`stale_helpers` lists, under the lock.

        Raises:
            ConcurrentSaveError: a save is committing for long.
        """
        with self._locked():
            self._remove_temporaries([*names, LOCK])

    def _replace(self, name: str, data: bytes) -> None:
        temporary = self._path(f".{name.lstrip('.')}.{os.urandom(4).hex()}.tmp")
        with self._system_errors(temporary, len(data)):
            try:
                self._write_small(temporary, data)
                self._changes.replace(temporary, self._path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    self._changes.remove(temporary)
                raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[CommitLock]:
        lock = self._lock()
        with self._system_errors(self._path(LOCK), len(lock.text)), lock.held():
            yield lock

    def _lock(self) -> CommitLock:
        stale_after = self._storage.stale_after
        return CommitLock(self._changes, self.location, stale_after, self._write_small)

    def delete(self, names: Iterable[str]) -> None:
        failed: StorageError | None = None
        for name in names:
            try:
                with self._system_errors(self._path(name)):
                    self._changes.remove(self._path(name))
            except MissingFileError:
                continue
            except StorageError as error:
                failed = failed or error  # which is no reason to leave the others
        if failed is not None:
            raise failed

    def remove_if_empty(self) -> None:
        with self._system_errors(self.location):
            try:
                self._changes.remove_directory(self.location)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise

    def _path(self, name: str) -> str:
        return os.path.join(self.location, safe_name(name))

    @contextlib.contextmanager
    def _system_errors(self, path: str, wanted: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError | MissingFileError):
                raise
            raise system_error(error, path, self.location, wanted) from error


def _stem(name: str) -> str | None:
    """What a temporary file is the new text of, with a point before it."""
    return name[: -len(".01234567.tmp")] if name.endswith(".tmp") else None
