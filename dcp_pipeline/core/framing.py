"""Messages between ranks: a JSON header and raw bytes behind it."""

from __future__ import annotations

import json
import struct
from typing import Any

__all__ = ["frame", "unframe"]


def frame(header: Any, *blobs: bytes) -> bytes:
    """A message of ``header`` (plain JSON data) and any number of byte strings."""
    text = json.dumps([header, [len(blob) for blob in blobs]], separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *blobs])


def unframe(message: bytes) -> tuple[Any, list[bytes]]:
    """The header and the byte strings of a message."""
    (length,) = struct.unpack_from("<I", message)
    header, sizes = json.loads(message[4 : 4 + length])
    blobs, position = [], 4 + length
    for size in sizes:
        blobs.append(message[position : position + size])
        position += size
    return header, blobs
