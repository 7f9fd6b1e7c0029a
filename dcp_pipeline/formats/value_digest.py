"""One number for what a Python value means, however it is stored."""

from __future__ import annotations

from typing import Any

from dcp_pipeline.core.checksum import array_digest, digest_of
from dcp_pipeline.formats.typed_json import canonical

__all__ = ["value_digest"]


def value_digest(value: Any) -> int:
    """A signed 64-bit hash of the value's typed JSON, equal where two values are.

    That of bytes is a hash of the type's name and the hash of the bytes: as text they would be in
    memory several times.

    Returns:
        0 for a value that has no typed JSON, and never for another.

    Example:
        >>> value_digest({"lr": 0.1}) == value_digest({"lr": 0.1}) != value_digest({"lr": 1})
        True
        >>> value_digest(object())
        0
    """
    if type(value) in (bytes, bytearray):
        return array_digest(type(value).__name__.encode() + digest_of("xxh3_64", value))
    meaning = canonical(value)
    return 0 if meaning is None else array_digest(meaning)
