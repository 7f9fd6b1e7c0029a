"""The bytes around a tensor's payload in the container that ``torch.save(tensor)`` writes.

What torch needs and no more: ``data.pkl``, ``byteorder``, ``version`` and ``data/0``. The payload
is the last entry and its CRC-32 follows it in a data descriptor, so that it can be streamed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32 as _crc32

import torch

from dcp_pipeline.core.errors import UnsupportedLeafError

__all__ = ["NEW_DTYPES", "TYPED_STORAGES", "ZipFrame", "frame_tensor"]

# The storage class that names a dtype in a pickle of torch.save.
TYPED_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
# Dtypes younger than storage classes: an UntypedStorage, and the dtype by name.
NEW_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "complex32",
        "float4_e2m1fn_x2",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "uint16",
        "uint32",
        "uint64",
    )
}

_ALIGNMENT = 64
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DATE = 0x21  # 1980-01-01, the earliest a zip can say: the same tensor is always the same bytes
_STREAMED = 0x08  # sizes and CRC follow the payload
_PICKLE_NAME, _DATA_NAME = b"archive/data.pkl", b"archive/data/0"
_HOOKS = b"\x89ccollections\nOrderedDict\n)R"  # requires_grad False, no backward hooks


@dataclass(frozen=True, slots=True)
class ZipFrame:
    """What surrounds the payload of one tensor.

    Attributes:
        head: every byte before the payload; a multiple of 64 long.
        payload_bytes: bytes of the payload, the tensor's elements in C order, little endian.
        tail_bytes: ``len(tail(crc))``, whatever the CRC.
    """

    head: bytes
    payload_bytes: int
    tail_bytes: int
    _sizes: bytes = field(repr=False)
    _before_crc: bytes = field(repr=False)
    _after_crc: bytes = field(repr=False)

    def tail(self, crc32: int) -> bytes:
        """Every byte after the payload, whose CRC-32 (``zlib.crc32``) is ``crc32``."""
        crc = crc32.to_bytes(4, "little")
        return b"".join((b"PK\x07\x08", crc, self._sizes, self._before_crc, crc, self._after_crc))


def frame_tensor(dtype: torch.dtype, sizes: Sequence[int]) -> ZipFrame:
    """The frame of a contiguous tensor: ``torch.load`` reads ``head + payload + tail(crc)``.

    Args:
        dtype: the tensor's dtype.
        sizes: its sizes in elements, ``()`` for a scalar.

    Raises:
        UnsupportedLeafError: a dtype that torch's container cannot hold.
        ValueError: a negative size, or more bytes than 2**63.

    Example:
        >>> import io, zlib
        >>> frame = frame_tensor(torch.int16, (2,))
        >>> payload = bytes([1, 0, 2, 0])
        >>> torch.load(io.BytesIO(frame.head + payload + frame.tail(zlib.crc32(payload))))
        tensor([1, 2], dtype=torch.int16)
    """
    return _frame(dtype, tuple(sizes))


@lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> ZipFrame:
    parts = _PICKLE_PARTS.get(dtype)
    if parts is None:
        raise UnsupportedLeafError(f"a tensor of {dtype}, which cannot be stored by torch_save")
    before_numel, after_strides, itemsize, counts_bytes = parts
    numel, strides = 1, []
    for size in reversed(sizes):
        if size < 0:
            raise ValueError(f"a tensor has no negative size: {sizes}")
        strides.append(numel)
        numel *= size or 1
    strides.reverse()
    numel = 0 if 0 in sizes else numel
    payload_bytes = numel * itemsize
    if payload_bytes >= 1 << 63:
        raise ValueError(f"a tensor of {dtype} and sizes {sizes} has 2**63 bytes or more")
    pickle = b"".join(
        (
            before_numel,
            _int(payload_bytes if counts_bytes else numel),
            b"tQK\x00",
            _tuple(sizes),
            _tuple(strides),
            after_strides,
        )
    )
    return _assemble(pickle, payload_bytes)


def _int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    body = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + len(body).to_bytes(1, "little") + body


def _tuple(values: Sequence[int]) -> bytes:
    items = b"".join(map(_int, values))
    if len(values) > 3:
        return b"(" + items + b"t"
    return items + (b")", b"\x85", b"\x86", b"\x87")[len(values)]


def _pickle_parts() -> dict[torch.dtype, tuple[bytes, bytes, int, bool]]:
    parts: dict[torch.dtype, tuple[bytes, bytes, int, bool]] = {}
    frame = "\x80\x02ctorch._utils\n_rebuild_tensor_v{}\n((X\x07\0\0\0storagec{}\n{}\n"
    place = b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    for storage, dtype in TYPED_STORAGES.items():
        start = frame.format(2, "torch", storage).encode("latin-1") + place
        parts[dtype] = (start, _HOOKS + b"tR.", dtype.itemsize, False)
    for name, dtype in NEW_DTYPES.items():
        start = frame.format(3, "torch.storage", "UntypedStorage").encode("latin-1") + place
        end = _HOOKS + f"ctorch\n{name}\ntR.".encode()
        parts[dtype] = (start, end, dtype.itemsize, True)
    return parts


_PICKLE_PARTS = _pickle_parts()


def _small_entry(name: bytes, data: bytes, offset: int) -> tuple[bytes, bytes]:
    """The local and the central record of an entry whose data is at hand."""
    crc, size = _crc32(data), len(data)
    local = _LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0)
    central = _CENTRAL.pack(
        b"PK\x01\x02", 20, 20, 0, 0, 0, _DATE, crc, size, size, len(name), 0, 0, 0, 0, 0, offset
    )
    return local + name + data, central + name


def _fixed_entries() -> tuple[bytes, bytes]:
    order, order_entry = _small_entry(b"archive/byteorder", b"little", 0)
    version, version_entry = _small_entry(b"archive/version", b"3\n", len(order))
    return order + version, order_entry + version_entry


# They come first, so that their records are the same in every frame; torch finds entries by name.
_FIXED, _FIXED_DIRECTORY = _fixed_entries()


def _assemble(pickle: bytes, payload_bytes: int) -> ZipFrame:
    wide = payload_bytes >= _MAX32
    local, directory = _small_entry(_PICKLE_NAME, pickle, len(_FIXED))
    at = len(_FIXED) + len(local)
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if wide else b""
    unpadded = at + _LOCAL.size + len(_DATA_NAME) + len(extra) + 4
    padding = -unpadded % _ALIGNMENT
    extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    need, size = (45, _MAX32) if wide else (20, 0)
    data_local = _LOCAL.pack(
        b"PK\x03\x04", need, _STREAMED, 0, 0, _DATE, 0, size, size, len(_DATA_NAME), len(extra)
    )
    head = b"".join((_FIXED, local, data_local, _DATA_NAME, extra))

    sizes = struct.pack("<QQ" if wide else "<II", payload_bytes, payload_bytes)
    start = len(head) + payload_bytes + 8 + len(sizes)
    shown = min(payload_bytes, _MAX32)
    more = struct.pack("<HHQQ", 1, 16, payload_bytes, payload_bytes) if wide else b""
    data_central = _CENTRAL.pack(
        b"PK\x01\x02", need, need, _STREAMED, 0, 0, _DATE, 0, shown, shown, len(_DATA_NAME),
        len(more), 0, 0, 0, 0, at,
    )  # fmt: skip
    before = _FIXED_DIRECTORY + directory + data_central[:16]
    after = data_central[20:] + _DATA_NAME + more
    after += _end_record(4, len(before) + 4 + len(after), start)
    tail_bytes = 8 + len(sizes) + len(before) + 4 + len(after)
    return ZipFrame(head, payload_bytes, tail_bytes, sizes, before, after)


def _end_record(count: int, size: int, start: int) -> bytes:
    end64 = b""
    if start >= _MAX32:
        end64 = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start
        ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, start + size, 1)
    return end64 + struct.pack(
        "<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _MAX32), 0
    )
