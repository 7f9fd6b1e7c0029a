"""JSON of files that are not trusted, parsed in memory that its author does not choose."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError

__all__ = ["parse_object"]


def parse_object(
    data: bytes, what: str, *, most_bytes: int, most_values: int = 1 << 20
) -> dict[str, Any]:
    """The members of a JSON object.

    Args:
        what: the file, for errors.
        most_bytes: that are looked at; a fourth of it where there is other text than ASCII.
        most_values: commas and opening brackets that may be in it: each can stand for a value of a
            hundred bytes, of which the text needs but two.

    Raises:
        FormatError: not a JSON object, a member that stands twice, a number that is none (``NaN``),
            text with half of a surrogate pair.
        UnsafeCheckpointError: too long, or of too many values.

    Example:
        >>> parse_object(b'{"a": [1]}', "it", most_bytes=100)
        {'a': [1]}
    """
    # One character beyond ASCII makes all of them need up to four bytes.
    if len(data) > (most_bytes if data.isascii() else most_bytes // 4):
        raise UnsafeCheckpointError(f"{what} has {len(data)} bytes, at most {most_bytes} are read")
    count = data.count(b",") + data.count(b"[") + data.count(b"{")
    if count > most_values:
        raise UnsafeCheckpointError(
            f"{what} holds {count} values or so, at most {most_values} are read"
        )
    try:
        text = data.decode("utf-8")
        found = json.loads(text, object_pairs_hook=_members, parse_constant=_no_number)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {str(error)[:300]}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} holds a {type(found).__name__}, expected an object")
    return found


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:200]!r} stands twice")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
