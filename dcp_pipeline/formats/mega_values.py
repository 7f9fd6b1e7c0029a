"""The typed values of MEGA's metadata, read and written without torch.

Types and widths are those of format version 1: numbers 0 to 9, bool 10, string 11, array 12.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError, UnsupportedLeafError
from dcp_pipeline.formats import typed_json

__all__ = [
    "JSON",
    "Cursor",
    "Value",
    "decode_leaf",
    "decode_value",
    "encode_value",
    "read_value",
    "write_text",
]

JSON: Final = "dcp_pipeline.json:"
"""What text begins with that is the typed JSON of a value of ours."""

Value = bool | int | float | str | list[Any]
"""What a value comes to in Python; an array is a list of values of one type."""

_NUMBERS: Final = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8")
_FLOAT64, _BOOL, _TEXT, _ARRAY = 9, 10, 11, 12
_INT64, _UINT64 = 7, 6
_LEAST: Final = {_BOOL: 1, _TEXT: 8}
_MAX_ELEMENTS = 1 << 22
_READ_BYTES = 256 << 10


class Cursor:
    """Reads a file from some place on, a window at a time, never behind an end.

    Args:
        read: ``(offset, nbytes)`` to bytes of the file.
        position: where to begin.
        end: what may not be read any more.
        what: the part of the file, for messages.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], position: int, end: int, what: str
    ) -> None:
        self._read = read
        self._start, self._window = position, b""
        self.position = position
        self.end = end
        self.what = what
        self.elements = _MAX_ELEMENTS

    @property
    def left(self) -> int:
        """Bytes before the end."""
        return self.end - self.position

    def take(self, nbytes: int) -> bytes:
        """The next bytes.

        Raises:
            FormatError: fewer are left.
        """
        if nbytes > self.left:
            raise FormatError(
                f"{self.what} is truncated: {nbytes} bytes at {self.position}, {self.left} are left"
            )
        begin = self.position - self._start
        if begin + nbytes > len(self._window):
            self._window = bytes(
                self._read(self.position, min(max(nbytes, _READ_BYTES), self.left))
            )
            if len(self._window) < nbytes:
                raise FormatError(f"{self.what} is truncated at {self.position}")
            self._start, begin = self.position, 0
        self.position += nbytes
        return self._window[begin : begin + nbytes]

    def u32(self) -> int:
        """A number of four bytes."""
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        """A number of eight bytes."""
        return int.from_bytes(self.take(8), "little")

    def text(self, width: int) -> str:
        """UTF-8 after its length, a number of ``width`` bytes.

        Raises:
            FormatError: it is cut off, or no UTF-8.
        """
        raw = self.take(int.from_bytes(self.take(width), "little"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.what} has text that is no UTF-8: {raw[:40]!r}") from error

    def counted(self, count: int, least: int, of: str) -> int:
        """``count`` if so many of ``least`` bytes could still come.

        Raises:
            FormatError: they could not.
        """
        if count > self.left // max(least, 1):
            raise FormatError(
                f"{self.what} claims {count} {of}, for which the {self.left} bytes left are too few"
            )
        return count


def read_value(cursor: Cursor) -> Value:
    """A type and its value.

    Raises:
        FormatError: an unknown type, an array of arrays, or more than there is.
        UnsafeCheckpointError: arrays of millions of elements.
    """
    kind = cursor.u32()
    if kind != _ARRAY:
        return _scalar(cursor, kind)
    kind, count = cursor.u32(), cursor.u64()
    if kind == _ARRAY:
        raise FormatError(f"{cursor.what} has an array of arrays")
    cursor.counted(count, _least(cursor, kind), "elements of an array")
    cursor.elements -= count
    if cursor.elements < 0:
        raise UnsafeCheckpointError(
            f"{cursor.what} has arrays of more than {_MAX_ELEMENTS} elements"
        )
    if kind < _BOOL:
        dtype = np.dtype(_NUMBERS[kind])
        numbers: list[Any] = np.frombuffer(cursor.take(count * dtype.itemsize), dtype).tolist()
        return numbers
    return [_scalar(cursor, kind) for _ in range(count)]


def _least(cursor: Cursor, kind: int) -> int:
    if kind < _BOOL:
        return np.dtype(_NUMBERS[kind]).itemsize
    if kind not in _LEAST:
        raise FormatError(f"{cursor.what} has a value of the unknown type {kind}")
    return _LEAST[kind]


def _scalar(cursor: Cursor, kind: int) -> Value:
    if kind == _TEXT:
        return cursor.text(8)
    least = _least(cursor, kind)
    raw = cursor.take(least)
    if kind == _BOOL:
        if raw not in (b"\0", b"\1"):
            raise FormatError(f"{cursor.what} has a bool of {raw[0]}")
        return raw == b"\1"
    number: Value = np.frombuffer(raw, _NUMBERS[kind])[0].item()
    return number


def decode_value(data: bytes) -> Value:
    """A type and its value that are all of ``data``.

    Raises:
        FormatError: they are not.
    """
    cursor = Cursor(lambda offset, nbytes: data[offset : offset + nbytes], 0, len(data), "a value")
    value = read_value(cursor)
    if cursor.left:
        raise FormatError(f"a value is followed by {cursor.left} bytes")
    return value


def decode_leaf(data: bytes) -> Any:
    """A value of a state: as :func:`decode_value`, or what typed JSON in a text says.

    Raises:
        FormatError: it is damaged.
        UnsafeCheckpointError: keys of it were chosen to have one hash.
    """
    value = decode_value(data)
    if isinstance(value, str) and value.startswith(JSON):
        return typed_json.decode(value.removeprefix(JSON).encode())
    return value


def encode_value(value: object) -> bytes | None:
    """Type and value, as :func:`decode_value` gives them back exactly; ``None`` where none does.

    >>> encode_value(True), encode_value((1, 2))
    (b'\\n\\x00\\x00\\x00\\x01', None)

    Raises:
        UnsupportedLeafError: text that is no UTF-8.
    """
    if type(value) is not list:
        kind = _kind(value)
        return None if kind is None else struct.pack("<I", kind) + _payload(kind, value)
    kinds = {_kind(item) for item in value}
    if kinds == {_INT64, _UINT64} and min(value) >= 0:
        kinds = {_UINT64}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or len(value) > _MAX_ELEMENTS:
        return None
    body = b"".join([_payload(kind, item) for item in value])
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + body


def _kind(value: object) -> int | None:
    if type(value) is bool:
        return _BOOL
    if type(value) is int and -(1 << 63) <= value < 1 << 64:
        return _INT64 if value < 1 << 63 else _UINT64
    if type(value) is float:
        return _FLOAT64
    return _TEXT if type(value) is str else None


def _payload(kind: int, value: Any) -> bytes:
    if kind == _BOOL:
        return b"\1" if value else b"\0"
    if kind == _TEXT:
        return write_text(value, 8)
    return struct.pack({_INT64: "<q", _UINT64: "<Q", _FLOAT64: "<d"}[kind], value)


def write_text(text: str, width: int) -> bytes:
    """UTF-8 after its length, a number of ``width`` bytes.

    Raises:
        UnsupportedLeafError: text that is no UTF-8.
    """
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(f"MEGA cannot hold the text {text!r}") from error
    return len(raw).to_bytes(width, "little") + raw
