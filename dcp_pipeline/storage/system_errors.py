"""The operating system's errors as ours: with path, code, and the room that is left."""

from __future__ import annotations

import contextlib
import errno
import os

from dcp_pipeline.core.errors import MissingFileError, StorageError

__all__ = ["system_error"]


def system_error(error: OSError, path: str, location: str, wanted: int | None = None) -> OSError:
    """What to raise for ``error``.

    Args:
        path: what was worked on.
        location: the directory that it is in.
        wanted: bytes that were to be written.
    """
    code = error.errno or errno.EIO
    if code == errno.ENOENT:
        return MissingFileError(f"{path} is not there", path)
    room = ""
    if wanted is not None:
        with contextlib.suppress(OSError):
            status = os.statvfs(location)
            free = status.f_bavail * status.f_frsize
            room = f" ({wanted} bytes wanted, {free} free in {location})"
    name = errno.errorcode.get(code, str(code))
    return StorageError(f"{path}: {error.strerror or error} [{name}]{room}", path, code)
