"""From stored bytes to elements and back: checksums, zstd, byte shuffle; without torch."""

from __future__ import annotations

import hashlib

import numpy as np
import zstandard

from dcp_pipeline.core.checksum import crc32
from dcp_pipeline.core.errors import ChecksumError, FormatError
from dcp_pipeline.core.spans import Span

__all__ = [
    "check_stored",
    "checksum_of",
    "compress",
    "decode_span",
    "shuffled",
    "unshuffled",
]

_STEP_BYTES = 1 << 20
_MAX_WINDOW = 1 << 27


def checksum_of(kind: str, data: bytes | memoryview) -> bytes:
    """The checksum of stored bytes, zlib's CRC-32, little-endian, or SHA-256; empty for none.

    >>> checksum_of("crc32", b"123456789").hex()
    '2639f4cb'
    """
    if kind == "crc32":
        return crc32(data).to_bytes(4, "little")
    return hashlib.sha256(data).digest() if kind == "sha256" else b""


def check_stored(span: Span, data: memoryview, name: str) -> None:
    """Compare stored bytes with their checksum, if they have one.

    Args:
        name: what is read, for the message.

    Raises:
        ChecksumError: they differ from what was written.
    """
    if not span.checksum:
        return
    found = checksum_of(span.checksum, data)
    if found != span.digest:
        raise ChecksumError(
            f"{name} is damaged: bytes {span.offset} to {span.offset + span.stored} have the"
            f" {span.checksum} {found.hex()}, {span.digest.hex()} was written"
        )


def decode_span(span: Span, data: memoryview, name: str) -> memoryview:
    """The elements that stored bytes give; nothing is trusted but the sizes that were checked.

    Raises:
        FormatError: they do not unpack to the size that the file says.
    """
    if span.codec == "zstd":
        data = _decompress(span, data, name)
    if span.shuffle > 1:
        data = unshuffled(data, span.shuffle)
    return data


def shuffled(data: bytes | memoryview, element: int) -> memoryview:
    """Bytes grouped by their place in their element, as the format's byte shuffle does.

    >>> bytes(shuffled(b"abcABC", 3))
    b'aAbBcC'
    """
    grid = np.frombuffer(data, np.uint8).reshape(-1, element)
    return np.ascontiguousarray(grid.T).reshape(-1).data


def unshuffled(data: bytes | memoryview, element: int) -> memoryview:
    """The inverse of :func:`shuffled`."""
    grid = np.frombuffer(data, np.uint8).reshape(element, -1)
    return np.ascontiguousarray(grid.T).reshape(-1).data


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame that says how much it holds."""
    return zstandard.ZstdCompressor(level=level).compress(data)


def _decompress(span: Span, data: memoryview, name: str) -> memoryview:
    unpacked: bytes | bytearray
    try:
        claimed = zstandard.frame_content_size(data)
        if claimed > span.size:
            raise FormatError(f"{name} unpacks to {claimed} bytes, expected {span.size}")
        if claimed == span.size and _is_one_frame(data):
            # One shot: no window beside the result, whatever the frame asks for.
            unpacked = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        else:
            unpacked = _stream(span.size, data)
    except (zstandard.ZstdError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{name} does not unpack: {error}") from error
    if len(unpacked) != span.size:
        raise FormatError(
            f"{name} unpacks to {'more than ' * (len(unpacked) > span.size)}"
            f"{min(len(unpacked), span.size)} bytes, expected {span.size}"
        )
    return memoryview(unpacked)


def _is_one_frame(data: memoryview) -> bool:
    # The magic number of a frame, not of a skippable one.
    return bytes(data[:4]) == b"\x28\xb5\x2f\xfd"


def _stream(size: int, data: memoryview) -> bytearray:
    """Frames that do not say what they hold, or several; at most one byte more than expected."""
    unpacked = bytearray()
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    with decompressor.stream_reader(data, read_across_frames=True) as reader:
        while len(unpacked) <= size:
            part = reader.read(min(_STEP_BYTES, size + 1 - len(unpacked)))
            if not part:
                break
            unpacked += part
    return unpacked
