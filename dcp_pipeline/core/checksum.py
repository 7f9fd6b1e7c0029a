"""Digests of blocks of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import xxhash
from isal import isal_zlib

from dcp_pipeline.core.errors import FormatError

__all__ = ["ALGORITHMS", "MAX_BLOCK_BYTES", "block_digests", "crc32", "digest_of", "digest_size"]

Buffer = bytes | bytearray | memoryview

MAX_BLOCK_BYTES = 64 << 20
"""Greater blocks are refused: to verify a part of one, all of it is read into memory."""


def crc32(data: Buffer, start: int = 0) -> int:
    """CRC-32 of ZIP files (polynomial 0x04C11DB7, reflected), continued from ``start``."""
    return int(isal_zlib.crc32(data, start))


def _xxh3(data: Buffer) -> bytes:
    return xxhash.xxh3_64_digest(data)


def _crc(data: Buffer) -> bytes:
    return crc32(data).to_bytes(4, "big")


def _sha(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()


ALGORITHMS: dict[str, tuple[int, Callable[[Buffer], bytes]]] = {
    "xxh3_64": (8, _xxh3),
    "crc32": (4, _crc),
    "sha256": (32, _sha),
}
"""Name to (bytes of a digest, function). Digests are stored most significant byte first."""


def digest_size(algorithm: str) -> int:
    """Bytes of one digest of ``algorithm``."""
    return _entry(algorithm)[0]


def _entry(algorithm: str) -> tuple[int, Callable[[Buffer], bytes]]:
    try:
        return ALGORITHMS[algorithm]
    except KeyError:
        allowed = ", ".join(ALGORITHMS)
        raise FormatError(f"unknown checksum algorithm {algorithm!r}; known: {allowed}") from None


def digest_of(algorithm: str, data: Buffer) -> bytes:
    """The digest of ``data`` as one block."""
    return _entry(algorithm)[1](data)


def block_digests(algorithm: str, data: memoryview, block_bytes: int) -> bytes:
    """Digests of ``data`` cut into blocks, joined; the last block may be shorter."""
    function = _entry(algorithm)[1]
    return b"".join(
        [function(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    )


def array_digest(data: Buffer) -> int:
    """A signed 64-bit hash of ``data``, never 0, for comparing replicas."""
    value = xxhash.xxh3_64_intdigest(data) or 1
    return int(np.uint64(value).astype(np.int64))
