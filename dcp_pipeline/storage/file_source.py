"""A file of a POSIX file system, open for reading."""

from __future__ import annotations

import os

from dcp_pipeline.core.errors import CorruptCheckpointError, StorageError
from dcp_pipeline.storage.base import Source

__all__ = ["FileSource"]


class FileSource(Source):
    """Reads through a descriptor, which it owns.

    Args:
        location: of the directory.
        name: of the file in it.
    """

    def __init__(self, location: str, name: str, descriptor: int) -> None:
        self.name = name
        self.size = os.fstat(descriptor).st_size
        self._location = location
        self._descriptor = descriptor

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

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
