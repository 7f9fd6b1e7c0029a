"""What ``save`` and ``load`` raise: the package's own error and torch's at once."""

from __future__ import annotations

import errno
import traceback

from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from dcp_pipeline.core.errors import CheckpointError

__all__ = ["CheckpointException", "Failures", "joint_error"]

Failures = dict[int, tuple[BaseException, traceback.StackSummary]]
"""The error of each rank that failed, as torch keeps it."""


class CheckpointException(CheckpointError, TorchCheckpointException):
    """A save or load that failed, on any rank.

    Every instance also has the type of the error that caused it, so ``except OSError``,
    ``except MissingKeyError`` and ``except torch.distributed.checkpoint.CheckpointException`` all
    catch what they should. Attributes of the cause (``errno``, ``missing`` …) are there too.

    Attributes:
        failures: rank to ``(exception, stack summary)``.
    """

    _failures: Failures
    is_shared = True
    """Every rank raises it."""


def joint_error(step: str, failures: Failures, own_rank: int) -> CheckpointException:
    """The error that all ranks raise when ``failures`` happened in ``step``.

    The cause is the error of the lowest failing rank; on a rank that failed itself its own
    exception becomes ``__cause__``, with its traceback.
    """
    first = min(failures)
    cause = failures[first][0]
    try:
        error = _combined(type(cause))(*cause.args[:1] or ("",))
    except TypeError:
        # A class of somebody else's, which cannot be made of one message.
        error = CheckpointException(str(cause), failures)
    error.__dict__.update(vars(cause))
    for name in ("errno", "filename", "strerror"):
        if isinstance(cause, OSError) and name not in vars(cause):
            setattr(error, name, getattr(cause, name))
    error.args = (_message(step, failures), failures)
    error._failures = failures
    # A class attribute of the cause would come first.
    error.is_shared = True
    error.__cause__ = failures[own_rank][0] if own_rank in failures else cause
    return error


def _message(step: str, failures: Failures) -> str:
    ranks = sorted(failures)
    errors = {rank: failures[rank][0] for rank in ranks}
    if len({f"{type(error).__name__}{error}" for error in errors.values()}) == 1:
        error = errors[ranks[0]]
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"{_place(error, step)} failed on {where}: {_sentence(error)}"
    lines = [
        f"rank {rank}, {_place(error, step)}: {_sentence(error)}" for rank, error in errors.items()
    ]
    return f"failed on {len(failures)} ranks:\n  " + "\n  ".join(lines)


def _place(error: BaseException, step: str) -> str:
    return str(getattr(error, "node", step))


def _sentence(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    code = errno.errorcode.get(getattr(error, "errno", None) or 0)
    return f"{type(error).__name__}: {error}" + (f" [{code}]" if code else "")


def _combined(kind: type[BaseException]) -> type[CheckpointException]:
    """A class that is a :class:`CheckpointException` and a ``kind``."""
    if not issubclass(kind, Exception) or issubclass(kind, TorchCheckpointException):
        return CheckpointException
    bases = (CheckpointException, kind)
    if issubclass(kind, CheckpointError):
        bases = (kind, CheckpointException)  # type: ignore[assignment]
    try:
        return type(kind.__name__, bases, {"__module__": kind.__module__, "__init__": _initialise})
    except TypeError:
        # Two built-ins of different memory layout cannot be mixed.
        return CheckpointException


def _initialise(self: CheckpointException, *args: object) -> None:
    Exception.__init__(self, *args)
