"""MEGA files made byte by byte, good ones and hostile ones, without the code under test."""

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = Path(__file__).parent / "data" / "mega"
TEXT, ARRAY = 11, 12


def text(value: str | bytes, width: int = 8) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return len(raw).to_bytes(width, "little") + raw


def value(given: Any) -> bytes:
    if isinstance(given, bytes):
        return given
    if isinstance(given, str):
        return struct.pack("<I", TEXT) + text(given)
    return struct.pack("<Iq", 7, given)


def pair(key: str, given: Any) -> bytes:
    return text(key) + value(given)


def crc(data: bytes) -> tuple[int, bytes]:
    return 1, zlib.crc32(data).to_bytes(4, "little").ljust(32, b"\0")


def sha(data: bytes) -> tuple[int, bytes]:
    return 2, hashlib.sha256(data).digest()


def shuffle(data: bytes, element: int) -> bytes:
    return b"".join(data[at::element] for at in range(element))


def entry(
    name: str,
    shape: Sequence[int] = (2, 3),
    dtype: str = "F32",
    offset: int = 0,
    *,
    storage: str | None = None,
    stored: int | None = None,
    flags: int | None = None,
    codec: int | None = None,
    shuffle: int | None = None,
    checksum: tuple[int, bytes] | None = None,
    fields: int = 0,
    ndim: int | None = None,
) -> bytes:
    optional = [
        (1, None if storage is None else text(storage, 4)),
        (2, None if stored is None else struct.pack("<Q", stored)),
        (4, None if flags is None else struct.pack("<I", flags)),
        (8, None if codec is None else struct.pack("<I", codec)),
        (16, None if shuffle is None else struct.pack("<I", shuffle)),
        (32, None if checksum is None else struct.pack("<I32s", *checksum)),
    ]
    mask = fields | sum(bit for bit, raw in optional if raw is not None)
    return b"".join(
        [
            text(name, 4),
            struct.pack("<II", mask, len(shape) if ndim is None else ndim),
            struct.pack(f"<{len(shape)}Q", *reversed(shape)),
            text(dtype, 4),
            struct.pack("<Q", offset),
            *(raw for _, raw in optional if raw is not None),
        ]
    )


def chunk(
    tensor: int,
    number: int,
    begin: int,
    size: int,
    offset: int,
    stored: int,
    codec: int = 0,
    flags: int = 0,
    checksum: tuple[int, bytes] = (0, b""),
    zero: int = 0,
) -> bytes:
    numbers = (tensor, number, begin, size, offset, stored, codec, flags, checksum[0], zero)
    return struct.pack("<IIQQQQIIII32s", *numbers, checksum[1])


def mega(
    entries: Sequence[bytes] = (),
    payload: bytes = b"",
    pairs: Mapping[str, Any] | None = None,
    chunks: Sequence[bytes] = (),
    *,
    alignment: int | None = 32,
    tensor_count: int | None = None,
    pair_count: int | None = None,
    version: int = 1,
    magic: bytes = b"MEGA",
    extra: bytes = b"",
) -> bytes:
    given: dict[str, Any] = {"mega.tensor_info.format": "self_describing"}
    if alignment is not None:
        given["general.alignment"] = alignment
    if chunks:
        given["mega.chunk_directory.count"] = len(chunks)
        given["mega.chunk_directory.format"] = "v1"
    given |= pairs or {}
    head = b"".join(
        [
            magic,
            struct.pack("<I", version),
            struct.pack("<Q", len(entries) if tensor_count is None else tensor_count),
            struct.pack("<Q", len(given) if pair_count is None else pair_count),
            *(pair(key, item) for key, item in given.items()),
            *entries,
            *chunks,
            extra,
        ]
    )
    return head + bytes(-len(head) % (alignment or 32)) + payload


def footer(
    base: bytes,
    pairs: Mapping[str, Any],
    generation: int = 1,
    *,
    offset: int | None = None,
    size: int | None = None,
    base_size: int | None = None,
    digest: bytes | None = None,
) -> bytes:
    body = b"MGTF" + struct.pack("<Q", len(pairs))
    body += b"".join(pair(key, item) for key, item in pairs.items())
    trailer = struct.pack(
        "<4sQQQQ32s",
        b"MGTF",
        generation,
        len(base) if offset is None else offset,
        len(body) if size is None else size,
        len(base) if base_size is None else base_size,
        hashlib.sha256(body).digest() if digest is None else digest,
    )
    return base + body + trailer


FLOATS = np.arange(6, dtype="<f4").tobytes()
