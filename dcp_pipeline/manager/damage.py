"""Which errors say that a step is damaged."""

from __future__ import annotations

import errno

from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    NewerFormatError,
    RollbackFailedError,
    StorageError,
    UnsafeCheckpointError,
)

__all__ = ["is_damage"]

_DAMAGE = (CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError)
_NOT_DAMAGE = (NewerFormatError, RollbackFailedError)
_BAD_MEDIUM = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EUCLEAN", "ENODATA"))}


def is_damage(error: BaseException) -> bool:
    """Whether an error says that a checkpoint is not what was written, so that another may be.

    A template that does not fit, a newer format or a lost rank would be the same with any other.
    """
    if isinstance(error, _NOT_DAMAGE):
        return False
    is_unreadable = isinstance(error, StorageError) and error.errno in _BAD_MEDIUM
    return is_unreadable or isinstance(error, _DAMAGE)
