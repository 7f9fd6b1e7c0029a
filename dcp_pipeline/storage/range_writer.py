"""Writes ranges of a file, from several threads and several processes at once.

The inner pages of a large range go to disk past the page cache where the file system allows it; its
ends, which may lie on one page with a neighbour's, go through the cache.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from dcp_pipeline.storage.base import RangeWriter
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.file_writer import ALIGNMENT, DIRECT, BufferPool

__all__ = ["FileRanges"]

_SMALLEST_DIRECT = 256 << 10


class FileRanges(RangeWriter):
    """One file of a file system.

    Args:
        changes: what makes the changes.
        path: made where it is not there.
        size: of the whole file, bytes; room for it is reserved with ``reserve``.
        errors: gives the context in which the system's errors become the package's.
        buffers: for what leaves out the page cache; ``None`` where nothing does.
        sync: make the file durable when it is closed.
    """

    def __init__(
        self,
        changes: FileChanges,
        path: str,
        size: int,
        buffers: BufferPool | None,
        errors: Callable[[str, int | None], AbstractContextManager[None]],
        *,
        reserve: bool,
        sync: bool,
    ) -> None:
        self._changes, self._path, self._sync = changes, path, sync
        self._errors = errors
        self._buffers = buffers if DIRECT else None
        self._direct = -1
        self._lock = threading.Lock()
        self._descriptor = changes.open_shared(path)
        try:
            is_reserved = reserve and changes.reserve(self._descriptor, size)
            if not is_reserved and os.fstat(self._descriptor).st_size < size:
                changes.truncate(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, offset: int, data: memoryview) -> None:
        with self._errors(self._path, len(data)):
            self._write(offset, data)

    def _write(self, offset: int, data: memoryview) -> None:
        begin = -(-offset // ALIGNMENT) * ALIGNMENT
        end = (offset + len(data)) // ALIGNMENT * ALIGNMENT
        if end - begin < _SMALLEST_DIRECT or not self._write_direct(
            begin, data[begin - offset : end - offset]
        ):
            self._changes.write(self._descriptor, [data], offset)
            return
        self._changes.write(self._descriptor, [data[: begin - offset]], offset)
        self._changes.write(self._descriptor, [data[end - offset :]], end)

    def _write_direct(self, offset: int, data: memoryview) -> bool:
        """Write whole pages past the cache; whether the file system lets us."""
        if self._buffers is None or not self._open_direct():
            return False
        pool = self._buffers
        buffer = pool.acquire()
        try:
            view, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
            for start in range(0, len(data), len(view)):
                piece = data[start : start + len(view)]
                np.copyto(array[: len(piece)], np.frombuffer(piece, np.uint8))
                self._changes.write(self._direct, [view[: len(piece)]], offset + start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._buffers = None
            return False
        finally:
            pool.release(buffer)
        return True

    def _open_direct(self) -> bool:
        with self._lock:
            if self._direct < 0:
                try:
                    self._direct = self._changes.open_shared(self._path, DIRECT)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._buffers = None
            return self._direct >= 0

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        direct, self._direct = self._direct, -1
        if direct >= 0:
            os.close(direct)
        with self._errors(self._path, None):
            try:
                if self._sync:
                    self._changes.sync(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._changes.close(descriptor)

    def give_up(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._direct = -1
