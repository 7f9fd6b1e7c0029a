"""Every error the package raises, torch-free.

The tree (a built-in in brackets is a second base, so that the obvious ``except`` catches it)::

    CheckpointError
    ├── ConfigError [ValueError]             a config that cannot be built; carries the key's path
    ├── GraphError [ValueError]              a missing input, a duplicate output or a cycle
    ├── StateError [ValueError]
    │   ├── UnsupportedLeafError [TypeError]     values that no checkpoint can hold
    │   ├── ShapeConflictError                   ranks disagree about a tensor's shape or dtype
    │   ├── ReplicaMismatchError                 replicas of one tensor differ in value
    │   ├── TilingError                          chunks leave a gap, overlap or lie out of bounds
    │   └── RuleError                            keys that the rules forget, lack or make twice
    ├── LoadMismatchError [ValueError]       the template and the checkpoint do not fit
    │   ├── MissingKeyError [KeyError]
    │   ├── UnexpectedKeyError [KeyError]
    │   ├── ShapeMismatchError
    │   ├── DtypeMismatchError [TypeError]
    │   ├── WorldSizeMismatchError [StateError]  values of single ranks, saved by more or fewer
    │   └── RulesMismatchError [StateError]      rules that do not fit the checkpoint's keys
    ├── CheckpointNotFoundError [FileNotFoundError]
    │   └── IncompleteCheckpointError            data is there, but nothing was ever committed
    ├── CheckpointExistsError [FileExistsError]
    ├── ConcurrentSaveError [RuntimeError]   another save committed into the directory meanwhile
    ├── ForeignOverwriteError [RuntimeError] plain DCP has saved over our checkpoint
    ├── CorruptCheckpointError [ValueError]
    │   ├── ChecksumError                        bytes differ from what was written
    │   ├── FormatError                          a file does not follow its format
    │   │   └── NewerFormatError                 written by a newer major version
    │   └── MissingFileError [FileNotFoundError] a file that the commit record names is gone
    ├── UnsafeCheckpointError [ValueError]   refused: code, a path leading out, absurd sizes
    ├── StorageError [OSError]               the system's own error, with path and room left
    │   └── UnfinishedCommitError                committed, but it may not survive a loss of power
    ├── CoordinationError [RuntimeError]
    │   ├── NotDistributedError                  several ranks by WORLD_SIZE, but no process group
    │   ├── DisagreementError [ValueError]       ranks name different checkpoints or configs
    │   ├── BackgroundDiedError                  a background process has ended by itself
    │   └── PeerFailedError                      this rank stopped because another one failed
    ├── RollbackFailedError [RuntimeError]   a failed load could not be undone
    └── RemoteError [RuntimeError]           an error of a type unknown here, from another rank

What ``save`` and ``load`` raise is one of these and ``types.CheckpointException`` at once, which
is also torch's ``CheckpointException``; that class lives in ``types`` because it needs torch.
"""

from __future__ import annotations

import errno as _errno
from collections.abc import Iterable, Sequence

__all__ = [
    "BackgroundDiedError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ChecksumError",
    "ConcurrentSaveError",
    "ConfigError",
    "CoordinationError",
    "CorruptCheckpointError",
    "DisagreementError",
    "DtypeMismatchError",
    "ForeignOverwriteError",
    "FormatError",
    "GraphError",
    "IncompleteCheckpointError",
    "LoadMismatchError",
    "MissingFileError",
    "MissingKeyError",
    "NewerFormatError",
    "NotDistributedError",
    "PeerFailedError",
    "RemoteError",
    "ReplicaMismatchError",
    "RollbackFailedError",
    "RuleError",
    "RulesMismatchError",
    "ShapeConflictError",
    "ShapeMismatchError",
    "StateError",
    "StorageError",
    "TilingError",
    "UnexpectedKeyError",
    "UnfinishedCommitError",
    "UnsafeCheckpointError",
    "UnsupportedLeafError",
    "WorldSizeMismatchError",
    "list_some",
]


def list_some(names: Iterable[object], limit: int = 20) -> str:
    """Join ``names`` for a message, saying how many were left out."""
    items = [str(name) for name in names]
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


class CheckpointError(Exception):
    """Base of every error of this package."""

    @property
    def message(self) -> str:
        """The sentence this error was raised with."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        # KeyError would show the repr and OSError an errno tuple; a message is a sentence.
        return self.message


class ConfigError(CheckpointError, ValueError):
    """A config that cannot be built.

    Args:
        message: what was found, what is allowed.
        path: the dotted path of the key, as a user would write it in an override.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class GraphError(CheckpointError, ValueError):
    """A graph with a missing input, a duplicate output or a cycle."""


class StateError(CheckpointError, ValueError):
    """The state handed to ``save`` cannot be stored as it is."""


class UnsupportedLeafError(StateError, TypeError):
    """Leaves that no checkpoint can hold; the message names every one of them."""


class ShapeConflictError(StateError):
    """Ranks give one key different shapes, dtypes or kinds."""


class ReplicaMismatchError(StateError):
    """Ranks hold different values under one key that was taken for a replica."""


class TilingError(StateError):
    """The chunks of a tensor leave a gap, overlap, or lie out of its bounds."""


class RuleError(StateError):
    """Rules that do not fit the keys they meet: all that is wrong, in one error.

    Attributes:
        problems: one line each.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = list(problems)

    @classmethod
    def of(cls, problems: Sequence[str], where: str) -> RuleError:
        """The error for some problems."""
        shown = "\n  ".join(problems[:100])
        more = f"\n  and {len(problems) - 100} more" * (len(problems) > 100)
        return cls(
            f"the rules do not fit {where} in {len(problems)} places:\n  {shown}{more}", problems
        )


class LoadMismatchError(CheckpointError, ValueError):
    """The template handed to ``load`` does not fit the checkpoint.

    Attributes:
        missing: keys that the template wants and the checkpoint lacks.
        unexpected: keys that the checkpoint holds and no rank wants.
        shapes: ``(key, shape in the checkpoint, shape in the template)``.
        dtypes: ``(key, dtype in the checkpoint, dtype in the template)``.
        world_sizes: ``(key, ranks that saved, ranks that load)`` of values of single ranks.
    """

    def __init__(
        self,
        message: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        shapes: Sequence[tuple[str, object, object]] = (),
        dtypes: Sequence[tuple[str, object, object]] = (),
        world_sizes: Sequence[tuple[str, object, object]] = (),
    ) -> None:
        super().__init__(message)
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.shapes = list(shapes)
        self.dtypes = list(dtypes)
        self.world_sizes = list(world_sizes)


class MissingKeyError(LoadMismatchError, KeyError):
    """A key that the template wants and the checkpoint lacks."""


class UnexpectedKeyError(LoadMismatchError, KeyError):
    """A key that the checkpoint holds and no rank wants."""


class ShapeMismatchError(LoadMismatchError):
    """A tensor whose shape in the checkpoint is not the template's."""


class DtypeMismatchError(LoadMismatchError, TypeError):
    """A tensor whose dtype in the checkpoint is not the template's, with no cast declared."""


class WorldSizeMismatchError(LoadMismatchError, StateError):
    """Values of single ranks that another number of ranks has saved, with no rule for that."""


class RulesMismatchError(LoadMismatchError, StateError):
    """Rules forget, lack or make twice some keys of the checkpoint that is loaded."""


class _SystemError(CheckpointError, OSError):
    """Sets ``errno`` on an error whose message is a sentence of ours."""

    _errno = _errno.EIO

    def __init__(self, message: str, filename: str | None = None, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = self._errno if errno is None else errno
        self.filename = filename


class CheckpointNotFoundError(_SystemError, FileNotFoundError):
    """There is no checkpoint at the given id."""

    _errno = _errno.ENOENT


class IncompleteCheckpointError(CheckpointNotFoundError):
    """Data of a checkpoint is there, but no commit record: the save never finished."""


class CheckpointExistsError(_SystemError, FileExistsError):
    """A committed checkpoint is there and ``overwrite`` is ``error``."""

    _errno = _errno.EEXIST


class ConcurrentSaveError(CheckpointError, RuntimeError):
    """Another save committed into the same checkpoint while this one was under way."""


class ForeignOverwriteError(CheckpointError, RuntimeError):
    """``.metadata`` belongs to a save that the manifest knows nothing of."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """The files of a committed checkpoint are not what was written."""


class ChecksumError(CorruptCheckpointError):
    """Bytes of a file differ from the digest taken when they were written."""


class FormatError(CorruptCheckpointError):
    """A file does not follow its format."""


class NewerFormatError(FormatError):
    """A manifest of a newer major version than this package reads."""


class MissingFileError(_SystemError, CorruptCheckpointError, FileNotFoundError):
    """A file that the commit record names is not there."""

    _errno = _errno.ENOENT


class UnsafeCheckpointError(CheckpointError, ValueError):
    """A file asks for what reading data never needs: code, a path outside, absurd sizes."""


class StorageError(_SystemError):
    """The operating system's own error, with its ``errno``, the path, and the room left."""


class UnfinishedCommitError(StorageError):
    """The checkpoint was committed, but it may not be durable, or ``.metadata`` is the old one.

    Attributes:
        is_committed: as in :class:`CoordinationError`.
    """

    is_committed: bool | None = True


class CoordinationError(CheckpointError, RuntimeError):
    """The ranks could not come to an agreement.

    Attributes:
        is_shared: whether the other ranks know already, or cannot be told.
        is_committed: of a save that lost contact with a rank while it was committed, whether it
            was; ``None`` where that is not known, and for all else.
    """

    is_shared = False
    is_committed: bool | None = None


class NotDistributedError(CoordinationError):
    """``WORLD_SIZE`` is above 1 but ``torch.distributed`` has no process group."""


class DisagreementError(CoordinationError, ValueError):
    """Ranks name different checkpoints or hold different configs."""


class BackgroundDiedError(CoordinationError):
    """The process that saves in the background has ended, or does not answer.

    Attributes:
        exit_code: how it ended, ``None`` where that is not known; negative for a signal.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerFailedError(CoordinationError):
    """This rank stopped because another one failed; the other's error says why."""


class RollbackFailedError(CheckpointError, RuntimeError):
    """A failed load could not be undone; the message names what is left changed.

    Attributes:
        is_shared: as in :class:`CoordinationError`.
    """

    is_shared = False


class RemoteError(CheckpointError, RuntimeError):
    """An error of a type that is not known here, raised on another rank.

    Attributes:
        type_name: the qualified name of its type there.
    """

    def __init__(self, message: str, type_name: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
