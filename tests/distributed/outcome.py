"""What a rank gives back: a value, or why there is none."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Died", "Failure", "failure_of"]


@dataclass(frozen=True)
class Failure:
    """An exception that a rank raised.

    Attributes:
        type: name of its class.
        bases: names of all classes that it is an instance of.
        message: its text.
        attributes: those that can be sent: ``errno``, ``missing``, ``node`` and so on.
        failures: of a ``CheckpointException``, rank to ``(type, message)``.
        trace: the traceback.
    """

    type: str
    bases: tuple[str, ...]
    message: str
    attributes: dict[str, Any] = field(repr=False)
    failures: dict[int, tuple[str, str]] = field(repr=False)
    trace: str = field(repr=False)

    def is_a(self, name: str) -> bool:
        """Whether ``except name`` would have caught it."""
        return name in self.bases

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__.get("attributes", {})
        if name not in attributes:
            raise AttributeError(name)
        return attributes[name]


@dataclass(frozen=True)
class Died:
    """A rank that ended before it answered.

    Attributes:
        code: its exit code, negative for a signal.
        output: the end of what it wrote to stderr.
    """

    code: int | None
    output: str = field(repr=False)


def failure_of(error: BaseException) -> Failure:
    """``error`` in a form that another process can unpickle without knowing its class."""
    attributes = {}
    for name in {*vars(error), "errno", "filename"}:
        value = getattr(error, name, None)
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            if type(value).__module__ == "builtins":
                attributes[name] = value
    failures = {
        rank: (type(cause).__name__, str(cause))
        for rank, (cause, _) in getattr(error, "failures", {}).items()
    }
    return Failure(
        type=type(error).__name__,
        bases=tuple(base.__name__ for base in type(error).__mro__),
        message=str(error),
        attributes=attributes,
        failures=failures,
        trace="".join(traceback.format_exception(error)),
    )
