"""Stored bytes that are not simply elements of a chunk: compressed, shuffled, cut, checksummed."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.packing import Column, pack_columns, unpack_columns

__all__ = [
    "CHECKSUM_BYTES",
    "Span",
    "SpansByRow",
    "check_spans",
    "decode_spans",
    "encode_spans",
    "moved",
]

CODECS: Final = ("raw", "zstd")
CHECKSUM_BYTES: Final[Mapping[str, int]] = {"": 0, "crc32": 4, "sha256": 32}
"""Bytes of a span's checksum, by its kind; the first is that of a span without one."""

_CHECKSUMS: Final = tuple(CHECKSUM_BYTES)
_COLUMNS: Final = ("row", "offset", "stored", "begin", "size", "codec", "shuffle", "checksum")
_LIMIT: Final = 1 << 62
# A block of zstd, 128 KiB at most, takes four bytes at least.
_MAX_RATIO, _FREE_BYTES = 1 << 15, 1 << 17


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the elements of a chunk, as it is stored.

    Attributes:
        offset, stored: where its bytes lie in the file, and how many there are.
        begin, size: which bytes of the chunk's row-major elements they give.
        codec: ``raw`` or ``zstd``.
        shuffle: bytes per element where bytes are grouped by their place in the element; else 0.
        checksum: ``crc32`` (zlib's, little-endian) or ``sha256`` of the stored bytes; else empty.
        digest: its value.
    """

    offset: int
    stored: int
    begin: int
    size: int
    codec: str = "raw"
    shuffle: int = 0
    checksum: str = ""
    digest: bytes = b""

    @property
    def end(self) -> int:
        """Where it ends in the chunk."""
        return self.begin + self.size

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the elements."""
        return self.codec == "raw" and not self.shuffle


SpansByRow = Mapping[int, tuple[Span, ...]]
"""The spans of each encoded row of a chunk table, in order."""


def encode_spans(encoded: SpansByRow) -> dict[str, object]:
    """Spans as plain JSON data: packed columns, and the digests one after another."""
    rows = [(row, span) for row in sorted(encoded) for span in encoded[row]]
    table = np.asarray(
        [
            (
                row, span.offset, span.stored, span.begin, span.size, CODECS.index(span.codec),
                span.shuffle, _CHECKSUMS.index(span.checksum),
            )
            for row, span in rows
        ],
        np.int64,
    ).reshape(-1, len(_COLUMNS))  # fmt: skip
    packed = pack_columns({name: table[:, at].copy() for at, name in enumerate(_COLUMNS)})
    return {
        # A chunk without elements has no span; its row is told apart from plain ones all the same.
        "rows": sorted(row for row, spans in encoded.items() if not spans),
        "packed": base64.b64encode(packed).decode(),
        "digests": base64.b64encode(b"".join(span.digest for _, span in rows)).decode(),
    }


def decode_spans(data: Any) -> dict[int, tuple[Span, ...]]:
    """The inverse of :func:`encode_spans`; what the spans say is checked by :func:`check_spans`.

    Raises:
        FormatError: not what :func:`encode_spans` makes.
    """
    columns = unpack_columns(base64.b64decode(data["packed"], validate=True))
    digests = base64.b64decode(data["digests"], validate=True)
    if set(columns) != set(_COLUMNS) or len({c.shape for c in columns.values()}) != 1:
        raise FormatError("the columns of encoded rows are not those of spans")
    found: dict[int, list[Span]] = {int(row): [] for row in data["rows"]}
    at = 0
    for row, offset, stored, begin, size, codec, shuffle, checksum in zip(
        *(columns[name].tolist() for name in _COLUMNS), strict=True
    ):
        if not (0 <= codec < len(CODECS) and 0 <= checksum < len(_CHECKSUMS)):
            raise FormatError(f"an encoded row of codec {codec} and checksum {checksum}")
        kind = _CHECKSUMS[checksum]
        digest = digests[at : at + CHECKSUM_BYTES[kind]]
        at += CHECKSUM_BYTES[kind]
        span = Span(offset, stored, begin, size, CODECS[codec], shuffle, kind, digest)
        found.setdefault(row, []).append(span)
    if at != len(digests):
        raise FormatError(f"{len(digests)} bytes of digests, the spans have {at}")
    return {row: tuple(spans) for row, spans in found.items()}


def moved(encoded: SpansByRow, order: Column) -> dict[int, tuple[Span, ...]]:
    """The spans of the rows of a table that was put into another order.

    Args:
        order: ``[n]`` the rows as they were, in the order in which they are now.
    """
    if not encoded:
        return {}
    rows = order.tolist()
    return {now: encoded[before] for now, before in enumerate(rows) if before in encoded}


def check_spans(spans: Sequence[Span], nbytes: int, file_size: int, name: str) -> None:
    """Raise unless ``spans`` give the ``nbytes`` of a chunk, each once, from inside its file.

    Args:
        name: the key, for messages.

    Raises:
        FormatError: gaps, overlaps, ranges outside the file, or sizes that contradict each other.
        UnsafeCheckpointError: more is to be unpacked than the stored bytes could hold.
    """
    at = 0
    for span in spans:
        if min(span.offset, span.stored, span.size, span.shuffle) < 0 or span.size >= _LIMIT:
            raise FormatError(f"a span of {name!r} has a negative or absurd place or size")
        if span.begin != at:
            raise FormatError(f"the spans of {name!r} leave a gap or overlap at its byte {at}")
        at = span.end
        if span.offset + span.stored > file_size:
            raise FormatError(
                f"a span of {name!r} ends at {span.offset + span.stored}, its file has"
                f" {file_size} bytes"
            )
        if span.codec == "raw" and span.stored != span.size:
            raise FormatError(f"{span.size} bytes of {name!r} are stored in {span.stored}, raw")
        if span.codec == "zstd" and span.size > span.stored * _MAX_RATIO + _FREE_BYTES:
            raise UnsafeCheckpointError(
                f"{span.stored} compressed bytes of {name!r} claim to hold {span.size}"
            )
        if span.shuffle and span.size % span.shuffle:
            raise FormatError(
                f"a span of {name!r} has {span.size} bytes, shuffled in elements of {span.shuffle}"
            )
        if len(span.digest) != CHECKSUM_BYTES[span.checksum]:
            raise FormatError(f"a {span.checksum} of {len(span.digest)} bytes for {name!r}")
    if at != nbytes:
        raise FormatError(f"the spans of {name!r} hold {at} of its {nbytes} bytes")
