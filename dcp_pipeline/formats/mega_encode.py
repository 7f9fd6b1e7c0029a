"""The start of a MEGA file: everything before its payload.

Every field has its width before its value is known, so that a header made of spans with made-up
places and checksums is as long as the one that is written in the end.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.core.spans import Span
from dcp_pipeline.formats.mega import (
    ALIGNMENT_KEY,
    DIRECTORIES,
    FOOTER_MAGIC,
    INFO,
    INFO_KEY,
    MAGIC,
    VERSION,
)
from dcp_pipeline.formats.mega_tensors import (
    BITS,
    CHECKSUMS,
    CHUNK_ROW,
    CHUNKED,
    CODECS,
    COMPRESSED,
    RAW,
    SHUFFLED,
)
from dcp_pipeline.formats.mega_values import encode_value, write_text
from dcp_pipeline.formats.safetensors import storage_dtype, storage_shape

__all__ = ["Header", "MegaEntry", "dtype_code", "encode_footer", "encode_mega"]


@dataclass(frozen=True, slots=True)
class MegaEntry:
    """A tensor to be written.

    Attributes:
        name: its key.
        dtype_name: as torch names it.
        shape: its sizes in torch.
        spans: how it is stored; places are relative to the payload. Several are chunks.
    """

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """The bytes before the payload, padding included, and where in them each value lies."""

    data: bytes
    values: dict[str, tuple[int, int]]


def dtype_code(dtype_name: str) -> str:
    """How MEGA names a dtype of torch.

    Raises:
        UnsupportedLeafError: it has no name for it.
    """
    code = storage_dtype(dtype_name)[0] if not dtype_name.startswith("complex") else ""
    if code not in BITS:
        raise UnsupportedLeafError(f"a tensor of torch.{dtype_name}, which MEGA cannot hold")
    return code


def encode_mega(
    tensors: Sequence[MegaEntry], values: Mapping[str, bytes], alignment: int
) -> Header:
    """The header of a file.

    Args:
        values: key to type and value, as ``encode_value`` makes them.
        alignment: the payload begins at a multiple of it, bytes.

    Raises:
        UnsupportedLeafError: a name, a dtype or a key that MEGA cannot hold.
    """
    chunks = [
        (number, place, span)
        for number, tensor in enumerate(tensors)
        if len(tensor.spans) > 1
        for place, span in enumerate(tensor.spans)
    ]
    pairs = {ALIGNMENT_KEY: _value(alignment), INFO_KEY: _value(INFO)}
    if chunks:
        pairs[f"{DIRECTORIES[0][0]}.count"] = _value(len(chunks))
        pairs[f"{DIRECTORIES[0][0]}.format"] = _value("v1")
    taken = sorted(set(pairs) & set(values))
    if taken:
        raise UnsupportedLeafError(f"MEGA keeps the keys {', '.join(taken)} for itself")
    parts = [struct.pack("<4sIQQ", MAGIC, VERSION, len(tensors), len(pairs) + len(values))]
    position = len(parts[0])
    places = {}
    for key, value in {**pairs, **values}.items():
        name = write_text(key, 8)
        parts += [name, value]
        places[key] = (position + len(name), len(value))
        position += len(name) + len(value)
    parts += [_entry(tensor) for tensor in tensors]
    if chunks:
        parts.append(_rows(chunks))
    data = b"".join(parts)
    return Header(data + bytes(-len(data) % alignment), {key: places[key] for key in values})


def _value(value: object) -> bytes:
    encoded = encode_value(value)
    assert encoded is not None
    return encoded


def _flags(span: Span) -> int:
    return COMPRESSED * (span.codec != "raw") | SHUFFLED * (span.shuffle > 0)


def _entry(tensor: MegaEntry) -> bytes:
    shape = storage_shape(tensor.dtype_name, tensor.shape)
    is_chunked = len(tensor.spans) > 1
    first = tensor.spans[0]
    # Of chunks the reference takes both together for where they end in the payload.
    stored = sum(span.stored for span in tensor.spans)
    fields = 1 | 2
    tail = [write_text(CHUNKED if is_chunked else RAW, 4), struct.pack("<Q", stored)]
    if _flags(first) and not is_chunked:
        fields |= 4 | 8
        tail.append(struct.pack("<II", _flags(first), CODECS.index(first.codec)))
    shuffle = max(span.shuffle for span in tensor.spans)
    if shuffle:
        fields |= 16
        tail.append(struct.pack("<I", shuffle))
    if first.checksum and not is_chunked:
        fields |= 32
        tail.append(struct.pack("<I32s", CHECKSUMS.index(first.checksum), first.digest))
    return b"".join(
        [
            write_text(tensor.name, 4),
            struct.pack(f"<II{len(shape)}Q", fields, len(shape), *reversed(shape)),
            write_text(dtype_code(tensor.dtype_name), 4),
            struct.pack("<Q", min(span.offset for span in tensor.spans)),
            *tail,
        ]
    )


def _rows(chunks: Sequence[tuple[int, int, Span]]) -> bytes:
    rows = np.asarray(
        [
            (
                number, place, span.begin, span.size, span.offset, span.stored,
                CODECS.index(span.codec), _flags(span), CHECKSUMS.index(span.checksum), 0,
                span.digest,
            )
            for number, place, span in chunks
        ],
        CHUNK_ROW,
    )  # fmt: skip
    return rows.tobytes()


def encode_footer(values: Mapping[str, bytes], base_size: int, generation: int = 1) -> bytes:
    """A footer that adds key/values to a file of ``base_size`` bytes without one."""
    body = FOOTER_MAGIC + struct.pack("<Q", len(values))
    body += b"".join([write_text(key, 8) + value for key, value in values.items()])
    places = (generation, base_size, len(body), base_size)
    digest = hashlib.sha256(body).digest()
    return body + struct.pack("<4sQQQQ32s", FOOTER_MAGIC, *places, digest)
