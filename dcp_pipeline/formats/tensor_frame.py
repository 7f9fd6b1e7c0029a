"""The bytes around a tensor's payload in the container that ``torch.save(tensor)`` writes.

What torch needs and no more: ``data.pkl``, ``byteorder``, ``version`` and ``data/0``. The payload
is the last entry and its CRC-32 follows it in a data descriptor, so that it can be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.formats.zip_records import end_record, small_entry, streamed_entry

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


def _fixed_entries() -> tuple[bytes, bytes]:
    order, order_entry = small_entry(b"archive/byteorder", b"little", 0)
    version, version_entry = small_entry(b"archive/version", b"3\n", len(order))
    return order + version, order_entry + version_entry


# They come first, so that their records are the same in every frame; torch finds entries by name.
_FIXED, _FIXED_DIRECTORY = _fixed_entries()


def _assemble(pickle: bytes, payload_bytes: int) -> ZipFrame:
    local, directory = small_entry(_PICKLE_NAME, pickle, len(_FIXED))
    entry = streamed_entry(_DATA_NAME, payload_bytes, len(_FIXED) + len(local), _ALIGNMENT)
    head = _FIXED + local + entry.local
    start = len(head) + payload_bytes + entry.descriptor_bytes
    before = _FIXED_DIRECTORY + directory + entry.before_crc
    after = entry.after_crc
    after += end_record(4, len(before) + 4 + len(after), start)
    tail_bytes = entry.descriptor_bytes + len(before) + 4 + len(after)
    return ZipFrame(head, payload_bytes, tail_bytes, entry.sizes, before, after)
