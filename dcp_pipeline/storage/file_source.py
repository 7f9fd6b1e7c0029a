"""A file of a POSIX file system, open for reading."""

from __future__ import annotations

import errno
import os

from dcp_pipeline.core.errors import CorruptCheckpointError, StorageError
from dcp_pipeline.storage.base import Source
from dcp_pipeline.storage.changes import close_noted

__all__ = ["FileSource"]

_MAX_HOLES = 1000


class FileSource(Source):
    """Reads through a descriptor, which it owns once it is made.

    Args:
        location: of the directory.
        name: of the file in it.
        opened: the descriptor alone; emptied when it is closed.
    """

    def __init__(self, location: str, name: str, opened: list[int]) -> None:
        self.name = name
        self.size = os.fstat(opened[0]).st_size
        self._location = location
        self._descriptor = opened[0]
        self._opened = opened

    def read_into(self, offset: int, target: memoryview) -> None:
        position = 0
        while position < len(target):
            try:
                count = os.preadv(self._descriptor, [target[position:]], offset + position)
            except OSError as error:
                path = os.path.join(self._location, self.name)
                raise StorageError(f"{path}: {error.strerror}", path, error.errno) from error
            if count == 0:
                raise CorruptCheckpointError(
                    f"{self.name} in {self._location} ends at byte {offset + position},"
                    f" {offset + len(target)} are needed: it was cut off"
                )
            position += count

    def check_dense(self) -> None:
        """Refuse a file most of which was never written: its size says nothing.

        Raises:
            CorruptCheckpointError: so it is.
        """
        written = _written_bytes(self._descriptor, self.size)
        if 2 * written < self.size:
            raise CorruptCheckpointError(
                f"{self.name} in {self._location} has {self.size} bytes, of which only {written}"
                " were ever written: it was stretched"
            )

    def close(self) -> None:
        self._descriptor = -1
        close_noted(self._opened)

    def __del__(self) -> None:
        # Whoever has opened it may have been interrupted before it could be closed.
        if self.__dict__.get("_opened"):
            close_noted(self._opened)


def _written_bytes(descriptor: int, size: int) -> int:
    """Bytes of a file that lie in no hole; all of them where that cannot be told."""
    written = position = 0
    try:
        for _ in range(_MAX_HOLES):
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
            position = os.lseek(descriptor, begin, os.SEEK_HOLE)
            written += position - begin
            if position >= size:
                return written
    except OSError as error:
        # Behind the last byte that was written there is nothing; else holes are not known here.
        return written if error.errno == errno.ENXIO else size
    return size
