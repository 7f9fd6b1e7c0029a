"""The records of a zip archive whose entries are stored as they are (APPNOTE 6.3.9, 4.3 and 4.5).

Every number beyond 32 bits, and every count beyond 16, is written as zip64 wants it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from zlib import crc32

__all__ = ["StreamedEntry", "end_record", "small_entry", "streamed_entry"]

_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DATE = 0x21  # 1980-01-01, the earliest a zip can say: the same content is always the same bytes
_STREAMED = 0x08  # sizes and CRC follow the payload
_PADDING = 0x4246  # torch's own tag of an extra field that only fills up


@dataclass(frozen=True, slots=True)
class StreamedEntry:
    """An entry whose CRC-32 is known once its payload has been written.

    Attributes:
        local: what stands before the payload.
        sizes: the end of what stands behind it.
        before_crc, after_crc: its part of the directory, around the CRC.
    """

    local: bytes
    sizes: bytes
    before_crc: bytes
    after_crc: bytes

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of :meth:`descriptor`."""
        return 8 + len(self.sizes)

    def descriptor(self, crc: int) -> bytes:
        """What stands behind the payload."""
        return b"PK\x07\x08" + crc.to_bytes(4, "little") + self.sizes

    def central(self, crc: int) -> bytes:
        """Its part of the directory."""
        return self.before_crc + crc.to_bytes(4, "little") + self.after_crc


def small_entry(name: bytes, data: bytes, offset: int) -> tuple[bytes, bytes]:
    """The local and the central record of an entry whose data, of less than 4 GiB, is at hand.

    Args:
        offset: of the local record in the archive, less than 4 GiB.
    """
    crc, size = crc32(data), len(data)
    local = _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0)
    central = _CENTRAL.pack(
        b"PK\x01\x02", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0, 0, 0, 0, 0, offset
    )
    return local + name + data, central + name


def streamed_entry(name: bytes, payload_bytes: int, offset: int, alignment: int) -> StreamedEntry:
    """The records of an entry whose payload is going to be streamed.

    Args:
        offset: of the local record in the archive.
        alignment: the payload starts at a multiple of it.
    """
    is_wide, is_far = payload_bytes >= _MAX32, offset >= _MAX32
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if is_wide else b""
    unpadded = offset + _LOCAL.size + len(name) + len(extra) + 4
    padding = -unpadded % alignment
    extra += struct.pack("<HH", _PADDING, padding) + b"Z" * padding
    need, size = (45, _MAX32) if is_wide else (20, 0)
    local = _LOCAL.pack(
        b"PK\x03\x04", need, _STREAMED, 0, 0, _DATE, 0, size, size, len(name), len(extra)
    )
    sizes = struct.pack("<QQ" if is_wide else "<II", payload_bytes, payload_bytes)
    numbers = [payload_bytes] * 2 * is_wide + [offset] * is_far
    more = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    need = 45 if numbers else 20
    central = _CENTRAL.pack(
        b"PK\x01\x02", need, need, _STREAMED, 0, 0, _DATE, 0, min(payload_bytes, _MAX32),
        min(payload_bytes, _MAX32), len(name), len(more), 0, 0, 0, 0, min(offset, _MAX32),
    )  # fmt: skip
    return StreamedEntry(local + name + extra, sizes, central[:16], central[20:] + name + more)


def end_record(count: int, size: int, start: int) -> bytes:
    """The end of the archive.

    Args:
        count: of entries.
        size: of the directory, bytes.
        start: where the directory starts in the archive.
    """
    end64 = b""
    if start >= _MAX32 or size >= _MAX32 or count >= _MAX16:
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start
        ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    shown = min(count, _MAX16)
    return end64 + struct.pack(
        "<4sHHHHIIH",
        b"PK\x05\x06",
        0,
        0,
        shown,
        shown,
        min(size, _MAX32),
        min(start, _MAX32),
        0,
    )
