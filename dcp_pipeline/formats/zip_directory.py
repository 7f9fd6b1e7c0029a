"""Where the entries of a stored (never compressed) zip lie, found in two reads and not trusted."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError

__all__ = ["WHOLE_BYTES", "Window", "ZipEntry", "payload_offset", "read_directory"]

WHOLE_BYTES = 64 * 1024
_HEAD_BYTES = 4 * 1024
_TAIL_BYTES = 8 * 1024
_DIRECTORY_BYTES = 64 * 1024 * 1024
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_MAX32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One entry: its name, where its local header starts, its size in bytes, and its CRC-32."""

    name: str
    header_offset: int
    size: int
    crc32: int


class Window:
    """Reads of an item, served from its two ends, which are read once.

    Args:
        read: ``(offset, nbytes)`` to bytes of the item.
        length: bytes of the item.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read = read
        self.length = length
        whole = length <= WHOLE_BYTES
        self._tail_at = 0 if whole else length - _TAIL_BYTES
        self._tail = self._fetch(self._tail_at, length - self._tail_at)
        self._head = self._tail if whole else b""

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        got = bytes(self._read(offset, nbytes))
        if len(got) != nbytes:
            raise FormatError(f"truncated: {len(got)} of {nbytes} bytes at offset {offset}")
        return got

    def take(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes at ``offset``; raises ``FormatError`` if they leave the item."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.length:
            raise FormatError(
                f"a zip of {self.length} bytes points at {nbytes} bytes at offset {offset}"
            )
        if offset >= self._tail_at:
            return self._tail[offset - self._tail_at :][:nbytes]
        if not self._head:
            self._head = self._fetch(0, _HEAD_BYTES)
        if offset + nbytes <= len(self._head):
            return self._head[offset : offset + nbytes]
        return self._fetch(offset, nbytes)


def read_directory(window: Window, max_entries: int) -> list[ZipEntry]:
    """The entries of a zip in the order of its central directory, checked against each other.

    Raises:
        FormatError: malformed, truncated, compressed or encrypted, or entries that overlap.
        UnsafeCheckpointError: more than ``max_entries`` entries.
    """
    count, size, start, limit = _end_record(window)
    if count > max_entries or size > _DIRECTORY_BYTES:
        raise UnsafeCheckpointError(
            f"a zip lists {count} entries in {size} bytes, more than {max_entries} are absurd here"
        )
    if start + size != limit or count * _CENTRAL.size > size:
        raise FormatError(f"a zip's directory of {count} entries does not fit in {size} bytes")
    data = window.take(start, size)
    entries, pos = [], 0
    for _ in range(count):
        entry, pos = _central_entry(data, pos)
        entries.append(entry)
    if pos != size:
        raise FormatError("a zip's directory holds bytes that belong to no entry")
    if len({entry.name for entry in entries}) != len(entries):
        raise FormatError("a zip names an entry twice")
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    ends = [entry.header_offset for entry in ordered[1:]] + [start]
    for entry, end in zip(ordered, ends, strict=True):
        if entry.header_offset + _LOCAL.size + len(entry.name) + entry.size > end:
            raise FormatError(f"the zip entry {entry.name!r} runs into the next or out of the item")
    return entries


def payload_offset(window: Window, entry: ZipEntry) -> int:
    """Where the bytes of ``entry`` start, by its local header."""
    raw = window.take(entry.header_offset, _LOCAL.size)
    magic, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack(raw)
    if magic != b"PK\x03\x04" or method != 0 or flags & 0x2041:
        raise FormatError(f"the zip entry {entry.name!r} has no header of a stored entry")
    if window.take(entry.header_offset + _LOCAL.size, name_bytes) != entry.name.encode():
        raise FormatError(f"the zip entry {entry.name!r} has another name in its header")
    start = entry.header_offset + _LOCAL.size + name_bytes + extra_bytes
    if start + entry.size > window.length:
        raise FormatError(f"the zip entry {entry.name!r} runs out of the item")
    return int(start)


def _end_record(window: Window) -> tuple[int, int, int, int]:
    """Entries, bytes and offset of the central directory, and where it must end."""
    at = window.length - _END.size
    if at < 0:
        raise FormatError(f"{window.length} bytes are too few for a zip")
    magic, disk, first, here, count, size, start, comment = _END.unpack(window.take(at, _END.size))
    if magic != b"PK\x05\x06" or comment:
        raise FormatError("not a zip, or truncated: no end record in the last 22 bytes")
    if at >= _LOCATOR.size:
        magic, disk64, at64, disks = _LOCATOR.unpack(window.take(at - _LOCATOR.size, _LOCATOR.size))
        if magic == b"PK\x06\x07":  # torch writes the 64-bit record always
            magic, record, _, _, disk, first, here, count, size, start = _END64.unpack(
                window.take(at64, _END64.size)
            )
            if disk64 or disks != 1:
                raise FormatError("a zip of several parts")
            if magic != b"PK\x06\x06" or at64 + 12 + record != at - _LOCATOR.size:
                raise FormatError("a zip's 64-bit end record is malformed")
            at = at64
    if disk or first or here != count:
        raise FormatError("a zip of several parts")
    return count, size, start, at


def _central_entry(data: bytes, pos: int) -> tuple[ZipEntry, int]:
    if pos + _CENTRAL.size > len(data):
        raise FormatError("a zip's directory is cut off")
    (magic, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes,
     disk, _, _, offset) = _CENTRAL.unpack_from(data, pos)  # fmt: skip
    name_at = pos + _CENTRAL.size
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes + comment_bytes
    if magic != b"PK\x01\x02" or end > len(data):
        raise FormatError("a zip's directory is malformed")
    try:
        name = data[name_at:extra_at].decode()
    except UnicodeDecodeError as error:
        raise FormatError("a zip entry's name is not UTF-8") from error
    if method != 0:
        raise FormatError(f"the zip entry {name!r} is compressed, which torch.save never does")
    if flags & 0x2041:
        raise FormatError(f"the zip entry {name!r} is encrypted")
    size, packed, offset = _wide(data[extra_at : extra_at + extra_bytes], size, packed, offset)
    if packed != size or disk:
        raise FormatError(f"the zip entry {name!r} has two sizes, {packed} and {size} bytes")
    return ZipEntry(name, offset, size, crc), end


def _wide(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int, int]:
    """The three numbers with those that 32 bits cannot hold taken from the zip64 field."""
    if _MAX32 not in (size, packed, offset):
        return size, packed, offset
    pos = 0
    while pos + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, pos)
        body = extra[pos + 4 : pos + 4 + nbytes]
        pos += 4 + nbytes
        if kind != 1:
            continue
        values = [size, packed, offset]
        wanted = [at for at, value in enumerate(values) if value == _MAX32]
        if len(body) < 8 * len(wanted):
            raise FormatError("a zip entry's 64-bit field is cut off")
        for slot, at in enumerate(wanted):
            values[at] = struct.unpack_from("<Q", body, 8 * slot)[0]
        return values[0], values[1], values[2]
    return size, packed, offset
