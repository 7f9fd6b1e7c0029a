"""Errors as they travel between ranks: type name, message, system error and traceback text.

Nothing is pickled: an error is made anew from the names that are known here, and a type that is
not known arrives as :class:`RemoteError`.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from dcp_pipeline.core import errors as known_errors
from dcp_pipeline.core.errors import CheckpointError, RemoteError

__all__ = ["error_from_record", "error_to_record"]

_PLAIN = (str, int, float, bool, type(None), list, tuple)
_FRAMES = 40


def error_to_record(error: BaseException) -> dict[str, Any]:
    """What another rank needs to know of ``error``, as plain JSON data."""
    attributes = {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, _PLAIN) and not name.startswith("_")
    }
    for name in ("errno", "filename"):
        value = getattr(error, name, None)
        if isinstance(error, OSError) and isinstance(value, (str, int)):
            attributes[name] = value
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return {
        "type": type(error).__name__,
        "message": _text(error),
        "attributes": attributes,
        "frames": [[frame.filename, frame.lineno or 0, frame.name, frame.line] for frame in frames],
    }


def _text(error: BaseException) -> str:
    # A KeyError shows the repr of its key, and would show the repr of that once made anew.
    if isinstance(error, KeyError) and not isinstance(error, CheckpointError):
        return str(error.args[0]) if error.args else ""
    return str(error)


def error_from_record(record: dict[str, Any]) -> tuple[BaseException, traceback.StackSummary]:
    """The error again, and the stack it was raised from."""
    frames = traceback.StackSummary.from_list(
        [
            traceback.FrameSummary(str(file), int(line), str(name), lookup_line=False, line=text)
            for file, line, name, text in record["frames"]
        ]
    )
    return _rebuild(record), frames


def _rebuild(record: dict[str, Any]) -> BaseException:
    name, message = str(record["type"]), str(record["message"])
    kind = _known(name)
    if kind is None:
        return RemoteError(f"{name}: {message}", name)
    attributes = record["attributes"]
    if issubclass(kind, OSError) and not issubclass(kind, CheckpointError):
        code = attributes.get("errno")
        return kind(message) if code is None else OSError(code, _reason(message, code))
    try:
        error = kind(message)
        for attribute, value in attributes.items():
            setattr(error, attribute, value)
    except (TypeError, AttributeError, ValueError):
        # Whatever cannot be made of a message alone; the other ranks still have to hear of it.
        return RemoteError(f"{name}: {message}", name)
    return error


def _known(name: str) -> type[Exception] | None:
    kind = getattr(known_errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    # These cannot be made without the data that they are about.
    return None if issubclass(kind, UnicodeError) else kind


def _reason(message: str, code: int) -> str:
    return message.removeprefix(f"[Errno {code}] ")
