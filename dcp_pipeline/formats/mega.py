"""A MEGA file's header and footer, parsed without torch and without trusting them.

Format version 1, little-endian: ``MEGA``, counts, typed key/values, the table of tensors, then
directories; the payload begins at the next multiple of ``general.alignment``. A footer, if there is
one, replaces key/values. No array is made from a count before the bytes left could hold it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import FormatError, NewerFormatError, UnsafeCheckpointError
from dcp_pipeline.formats.mega_tensors import CHUNK_ROW, MegaTensor, read_entry, tensors_of
from dcp_pipeline.formats.mega_values import Cursor, Value, read_value

__all__ = [
    "ALIGNMENT_KEY",
    "DIRECTORIES",
    "FOOTER_MAGIC",
    "INFO",
    "INFO_KEY",
    "MAGIC",
    "VERSION",
    "KeyValue",
    "MegaFile",
    "parse_mega",
]

MAGIC: Final = b"MEGA"
VERSION: Final = 1
FOOTER_MAGIC: Final = b"MGTF"
DEFAULT_ALIGNMENT: Final = 32
ALIGNMENT_KEY: Final = "general.alignment"
INFO_KEY: Final = "mega.tensor_info.format"
INFO: Final = "self_describing"
DIRECTORIES: Final = (
    ("mega.chunk_directory", 88),
    ("mega.segment_directory", 72),
    ("mega.moe.expert_table", 32),
)
"""What may stand behind the table of tensors: the start of its keys, and the bytes of a row."""

_MAX_HEADER = 256 << 20
_MAX_ALIGNMENT = 1 << 30
_LEAST_KEY_VALUE, _LEAST_TENSOR = 13, 26
_MOST = 1 << 20
_TRAILER_BYTES = 68


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A value of the metadata, and where its type and bytes lie in the file."""

    value: Value
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MegaFile:
    """What a file says that it holds.

    Attributes:
        tensors: in the order of the table.
        metadata: key/values, those of the last footer put over those of the header.
        data_start, data_end: where the payload begins and ends.
        is_signed: whether somebody has signed it. Nothing here verifies that.
    """

    tensors: tuple[MegaTensor, ...]
    metadata: dict[str, KeyValue]
    data_start: int
    data_end: int
    is_signed: bool


def parse_mega(read: Callable[[int, int], bytes], file_size: int) -> MegaFile:
    """What a file holds, after every check that can be made without its payload.

    Args:
        read: ``(offset, nbytes)`` to bytes of the file.
        file_size: bytes of the file.

    Raises:
        FormatError: it is no MEGA file, is cut off, or contradicts itself.
        NewerFormatError: of a newer version.
        UnsafeCheckpointError: absurd sizes.
    """
    end = min(file_size, _MAX_HEADER)
    cursor = Cursor(read, 0, end, "the header of a MEGA file")
    if file_size < 24 or cursor.take(4) != MAGIC:
        raise FormatError(f"no MEGA file: {file_size} bytes that do not begin with {MAGIC!r}")
    version = cursor.u32()
    if version > VERSION:
        raise NewerFormatError(f"MEGA of version {version}, this package reads {VERSION}")
    if version != VERSION:
        raise FormatError(f"MEGA of version {version}, expected {VERSION}")
    tensor_count, pair_count = cursor.u64(), cursor.u64()
    _counted(cursor, tensor_count, _LEAST_TENSOR, "tensors")
    metadata = _read_pairs(cursor, pair_count)
    if tensor_count and _value(metadata, INFO_KEY) != INFO:
        raise FormatError(
            f"a MEGA file whose {INFO_KEY} is {str(_value(metadata, INFO_KEY))[:80]!r}, expected"
            f" {INFO!r}"
        )
    _counted(cursor, tensor_count, _LEAST_TENSOR, "tensors")
    entries = [read_entry(cursor) for _ in range(tensor_count)]
    chunks = _read_directories(cursor, metadata)
    alignment = _alignment(metadata)
    data_start = -(-cursor.position // alignment) * alignment
    footer, data_end = _read_footer(read, file_size)
    if data_start > data_end and entries:
        raise FormatError(f"the payload of a MEGA file starts at {data_start}, behind {data_end}")
    tensors = tensors_of(entries, chunks, data_start, data_end)
    for key in footer:
        if key in (ALIGNMENT_KEY, INFO_KEY) or key.startswith(
            tuple(f"{start}." for start, _ in DIRECTORIES)
        ):
            raise FormatError(f"the footer of a MEGA file replaces {key}, which decides its layout")
    is_signed = any(key.startswith("mega.trust.") for key in (*metadata, *footer))
    return MegaFile(tensors, metadata | footer, data_start, data_end, is_signed)


def _counted(cursor: Cursor, count: int, least: int, of: str) -> None:
    """Raise unless ``count`` rows of ``least`` bytes could come, and are not absurdly many."""
    cursor.counted(count, least, of)
    if count > _MOST:
        raise UnsafeCheckpointError(f"{cursor.what} has {count} {of}, at most {_MOST} are read")


def _read_pairs(cursor: Cursor, count: int) -> dict[str, KeyValue]:
    _counted(cursor, count, _LEAST_KEY_VALUE, "key/values")
    pairs: dict[str, KeyValue] = {}
    for _ in range(count):
        key = cursor.text(8)
        if key in pairs:
            raise FormatError(f"{cursor.what} has the key {key[:80]!r} twice")
        begin = cursor.position
        value = read_value(cursor)
        pairs[key] = KeyValue(value, begin, cursor.position - begin)
    return pairs


def _value(metadata: dict[str, KeyValue], key: str) -> Any:
    found = metadata.get(key)
    return None if found is None else found.value


def _alignment(metadata: dict[str, KeyValue]) -> int:
    value = _value(metadata, ALIGNMENT_KEY)
    if value is None:
        return DEFAULT_ALIGNMENT
    if type(value) is not int or not 1 <= value <= _MAX_ALIGNMENT:
        raise FormatError(f"a MEGA file whose {ALIGNMENT_KEY} is {str(value)[:80]}")
    return value


def _read_directories(cursor: Cursor, metadata: dict[str, KeyValue]) -> Any:
    """The rows of the chunk directory; the others are hints for prefetching, and passed over."""
    chunks = np.zeros(0, CHUNK_ROW)
    for start, row_bytes in DIRECTORIES:
        count, form = (_value(metadata, f"{start}.{end}") for end in ("count", "format"))
        if count is None and form is None:
            continue
        if type(count) is not int or count < 0 or form != "v1":
            raise FormatError(
                f"a MEGA file whose {start} has the count {str(count)[:40]} and the format"
                f" {str(form)[:40]!r}, expected v1"
            )
        _counted(cursor, count, row_bytes, f"rows of {start}")
        if row_bytes == CHUNK_ROW.itemsize:
            chunks = np.frombuffer(cursor.take(count * row_bytes), CHUNK_ROW)
        else:
            cursor.position += count * row_bytes
    return chunks


def _read_footer(
    read: Callable[[int, int], bytes], file_size: int
) -> tuple[dict[str, KeyValue], int]:
    """The key/values of the last footer, and where the file ended before it got any."""
    trailer = (
        bytes(read(file_size - _TRAILER_BYTES, _TRAILER_BYTES))
        if file_size > _TRAILER_BYTES
        else b""
    )
    if trailer[:4] != FOOTER_MAGIC:
        return {}, file_size
    generation, begin, nbytes, base = (
        int.from_bytes(trailer[at : at + 8], "little") for at in range(4, 36, 8)
    )
    where = f"the footer of a MEGA file, {nbytes} bytes at {begin} over {base}"
    if not generation or not base <= begin or begin + nbytes != file_size - _TRAILER_BYTES:
        raise FormatError(f"{where}, does not fit into its {file_size} bytes")
    if nbytes > _MAX_HEADER:
        raise UnsafeCheckpointError(f"{where}, is absurdly long")
    body = bytes(read(begin, nbytes))
    if hashlib.sha256(body).digest() != trailer[36:]:
        raise FormatError(f"{where}, does not match its SHA-256")
    cursor = Cursor(read, begin, begin + nbytes, "the footer of a MEGA file")
    if nbytes < 12 or cursor.take(4) != FOOTER_MAGIC:
        raise FormatError(f"{where}, does not begin with {FOOTER_MAGIC!r}")
    pairs = _read_pairs(cursor, cursor.u64())
    if cursor.left:
        raise FormatError(f"{where}, goes on behind its key/values")
    return pairs, base
