"""Streams the segments of one file to disk through a kept, page-aligned buffer.

With ``direct`` the page cache is left out (``O_DIRECT``), which takes a fraction of the CPU time
and is faster on local disks; where a file system refuses, the same loop goes on without it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import queue

import numpy as np

from dcp_pipeline.storage.base import Observer, Segments
from dcp_pipeline.storage.changes import FileChanges, close_noted

__all__ = ["ALIGNMENT", "DIRECT", "BufferPool", "stream_to_file"]

ALIGNMENT = 4096
DIRECT: int = getattr(os, "O_DIRECT", 0)
_SMALL_COPY = 1 << 15


class BufferPool:
    """Page-aligned buffers that are kept between files: memory touched once stays fast."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    def acquire(self) -> mmap.mmap:
        """A buffer of at least the pool's size."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return mmap.mmap(-1, self.nbytes)

    def release(self, buffer: mmap.mmap) -> None:
        """Give a buffer back for the next file."""
        self._free.put(buffer)

    def close(self) -> None:
        """Free all buffers that are not in use."""
        while not self._free.empty():
            self._free.get_nowait()


def stream_to_file(
    changes: FileChanges,
    path: str,
    size: int,
    segments: Segments,
    observe: Observer,
    buffer: mmap.mmap,
    *,
    direct: bool,
    reserve: bool,
    sync: bool,
) -> None:
    """Write a new file of ``size`` bytes; see :meth:`Directory.write`."""
    opened: list[int] = []
    try:
        opened.append(_create(changes, path, direct and size >= ALIGNMENT))
        descriptor = opened[0]
        if reserve and not changes.reserve(descriptor, size):
            _check_room(path, size)
        written = _stream(changes, descriptor, segments, observe, buffer)
        if written != size:
            raise ValueError(f"{path}: {written} bytes were produced, {size} were planned")
        if os.fstat(descriptor).st_size != size:
            changes.truncate(descriptor, size)
        if sync:
            changes.sync(descriptor)
        close_noted(opened, changes.close)
    except BaseException:
        close_noted(opened)
        raise


def _create(changes: FileChanges, path: str, direct: bool) -> int:
    if direct and DIRECT:
        try:
            return changes.create(path, DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file is made before the flag is refused.
            if os.path.exists(path):
                changes.remove(path)
    return changes.create(path)


def _check_room(path: str, size: int) -> None:
    status = os.statvfs(os.path.dirname(path))
    if status.f_bavail * status.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _stream(
    changes: FileChanges, descriptor: int, segments: Segments, observe: Observer, buffer: mmap.mmap
) -> int:
    view, array = memoryview(buffer), np.frombuffer(buffer, np.uint8)
    capacity, filled, offset = len(view), 0, 0
    for segment in segments:
        position, length = 0, len(segment)
        while position < length:
            count = min(capacity - filled, length - position)
            piece = segment[position : position + count]
            if count < _SMALL_COPY:
                view[filled : filled + count] = piece
            else:
                # NumPy lets other threads run while it copies; a memoryview does not.
                np.copyto(array[filled : filled + count], np.frombuffer(piece, np.uint8))
            filled += count
            position += count
            if filled == capacity:
                observe(view)
                _write(changes, descriptor, view, offset)
                offset, filled = offset + filled, 0
    if filled:
        observe(view[:filled])
        padded = -(-filled // ALIGNMENT) * ALIGNMENT if _is_direct(descriptor) else filled
        array[filled:padded] = 0
        _write(changes, descriptor, view[:padded], offset)
    return offset + filled


def _write(changes: FileChanges, descriptor: int, data: memoryview, offset: int) -> None:
    try:
        changes.write(descriptor, [data], offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not _is_direct(descriptor):
            raise
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        changes.write(descriptor, [data], offset)


def _is_direct(descriptor: int) -> bool:
    return bool(DIRECT and fcntl.fcntl(descriptor, fcntl.F_GETFL) & DIRECT)
