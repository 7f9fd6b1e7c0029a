"""The tensors of a MEGA file: rows of its table and of its chunk directory, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.spans import CHECKSUM_BYTES, Span, check_spans
from dcp_pipeline.core.table import MAX_DIMENSIONS
from dcp_pipeline.formats.mega_values import Cursor
from dcp_pipeline.formats.safetensors import torch_dtype_and_shape

__all__ = ["BITS", "CHUNK_ROW", "Entry", "MegaTensor", "read_entry", "tensors_of"]

CHUNK_ROW: Final = np.dtype(
    [
        ("tensor", "<u4"), ("chunk", "<u4"), ("begin", "<u8"), ("size", "<u8"), ("offset", "<u8"),
        ("stored", "<u8"), ("codec", "<u4"), ("flags", "<u4"), ("checksum", "<u4"), ("zero", "<u4"),
        ("digest", "S32"),
    ]
)  # fmt: skip
BITS: Final = {
    "BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip
RAW, CHUNKED = "raw_dense", "chunked_raw_dense"
COMPRESSED, SHUFFLED = 1, 2
CHECKSUMS: Final = ("", "crc32", "sha256")
CODECS: Final = ("raw", "zstd")


_LIMIT = 1 << 62
_MAX_NAME = 1 << 16
_KNOWN_FIELDS = 0b111111


@dataclass(frozen=True, slots=True)
class MegaTensor:
    """A tensor of a file.

    Attributes:
        name: its key.
        dtype: as torch names it.
        shape: its sizes in torch; of ``F4`` the last counts bytes of two elements.
        nbytes: of its elements.
        spans: how they are stored, in order; places are those in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    spans: tuple[Span, ...]

    @property
    def is_plain(self) -> bool:
        """Whether its elements lie in the file as they are, in one place."""
        return len(self.spans) == 1 and self.spans[0].is_plain


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the table of tensors, places relative to the payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    storage: str
    stored: int | None
    flags: int
    codec: int
    shuffle: int
    checksum: int
    digest: bytes


def read_entry(cursor: Cursor) -> Entry:
    name = cursor.text(4)
    what = f"the tensor {name[:80]!r}"
    if len(name) > _MAX_NAME:
        raise UnsafeCheckpointError(f"a name of {len(name)} characters, of {what}")
    fields, ndim = cursor.u32(), cursor.u32()
    if fields & ~_KNOWN_FIELDS:
        raise FormatError(f"{what} has fields that are not known here ({fields:#x})")
    if ndim > MAX_DIMENSIONS:
        raise UnsafeCheckpointError(f"{what} has {ndim} dimensions, at most {MAX_DIMENSIONS}")
    # The format counts dimensions from the last one on.
    sizes = np.frombuffer(cursor.take(8 * ndim), "<u8").tolist()[::-1]
    code, offset = cursor.text(4), cursor.u64()
    if code not in BITS:
        raise FormatError(f"{what} has the unknown dtype {code[:40]!r}")
    bits = prod(size or 1 for size in sizes) * BITS[code]
    if bits >= _LIMIT or offset >= _LIMIT:
        raise UnsafeCheckpointError(f"{what} has an absurd shape or place")
    dtype, shape = torch_dtype_and_shape(code, sizes)
    nbytes = prod(sizes) * BITS[code] // 8
    storage = cursor.text(4) if fields & 1 else RAW
    stored = cursor.u64() if fields & 2 else None
    flags = cursor.u32() if fields & 4 else 0
    codec = cursor.u32() if fields & 8 else 0
    shuffle = cursor.u32() if fields & 16 else 0
    checksum, digest = (cursor.u32(), cursor.take(32)) if fields & 32 else (0, bytes(32))
    if storage not in (RAW, CHUNKED):
        raise FormatError(f"{what} is stored as {storage[:40]!r}, which is not known here")
    return Entry(
        name, dtype, shape, nbytes, offset, storage, stored, flags, codec, shuffle, checksum, digest
    )


def tensors_of(
    entries: Sequence[Entry], chunks: Any, data_start: int, data_end: int
) -> tuple[MegaTensor, ...]:
    room = data_end - data_start
    if len({entry.name for entry in entries}) != len(entries):
        raise FormatError("a MEGA file has a tensor twice")
    if len(chunks) and int(chunks["tensor"].max()) >= len(entries):
        raise FormatError("a chunk belongs to a tensor that is not there")
    order = np.lexsort([chunks["chunk"], chunks["begin"], chunks["tensor"]])
    chunks = chunks[order]
    starts = np.searchsorted(chunks["tensor"], np.arange(len(entries) + 1))
    tensors = []
    for number, entry in enumerate(entries):
        part = chunks[int(starts[number]) : int(starts[number + 1])]
        if entry.storage == CHUNKED:
            spans = _chunk_spans(entry, part, data_start)
        elif len(part):
            raise FormatError(f"the tensor {entry.name[:80]!r} is stored whole and has chunks")
        else:
            spans = [_whole_span(entry, data_start)]
        for span in spans:
            if span.offset + span.stored > data_end:
                raise FormatError(
                    f"the tensor {entry.name[:80]!r} has {span.stored} bytes at"
                    f" {span.offset - data_start} of a payload of {max(room, 0)}"
                )
        check_spans(spans, entry.nbytes, data_end, entry.name[:80])
        tensors.append(MegaTensor(entry.name, entry.dtype, entry.shape, entry.nbytes, tuple(spans)))
    _check_overlap(tensors)
    return tuple(tensors)


def _whole_span(entry: Entry, data_start: int) -> Span:
    if entry.flags & COMPRESSED and entry.stored is None:
        raise FormatError(f"{entry.name[:80]!r} is compressed, to a size that is not said")
    stored = entry.nbytes if entry.stored is None else entry.stored
    place = (data_start + entry.offset, stored, 0, entry.nbytes)
    return _span(entry, place, entry.flags, entry.codec, entry.checksum, entry.digest)


def _chunk_spans(entry: Entry, rows: Any, data_start: int) -> list[Span]:
    if entry.flags or entry.codec or entry.checksum:
        raise FormatError(f"{entry.name[:80]!r} is chunked and says how it is stored as a whole")
    if len(np.unique(rows["chunk"])) != len(rows):
        raise FormatError(f"{entry.name[:80]!r} has a chunk twice")
    spans = []
    for _, _, begin, size, offset, stored, codec, flags, checksum, zero, digest in rows.tolist():
        if zero or not size or max(begin, size, offset, stored) >= _LIMIT:
            raise FormatError(f"a chunk of {entry.name[:80]!r} is empty, or absurdly large")
        place = (data_start + offset, stored, begin, size)
        spans.append(_span(entry, place, flags, codec, checksum, digest.ljust(32, b"\0")))
    return spans


def _span(
    entry: Entry,
    place: tuple[int, int, int, int],
    flags: int,
    codec: int,
    checksum: int,
    digest: bytes,
) -> Span:
    name = entry.name[:80]
    if flags & ~(COMPRESSED | SHUFFLED):
        raise FormatError(f"{name!r} has flags that are not known here ({flags:#x})")
    if codec >= len(CODECS) or checksum >= len(CHECKSUMS):
        raise FormatError(f"{name!r} has the unknown codec {codec} or checksum {checksum}")
    if bool(flags & COMPRESSED) != bool(codec):
        raise FormatError(f"{name!r} has the flags {flags:#x} and the codec {codec}")
    if flags & SHUFFLED and not entry.shuffle:
        raise FormatError(f"{name!r} is shuffled in elements of no bytes")
    if max(place) >= _LIMIT:
        raise UnsafeCheckpointError(f"{name!r} has an absurd size or place")
    length = CHECKSUM_BYTES[CHECKSUMS[checksum]]
    if any(digest[length:]):
        raise FormatError(f"the checksum of {name!r} is longer than {length} bytes")
    shuffle = entry.shuffle if flags & SHUFFLED else 0
    return Span(*place, CODECS[codec], shuffle, CHECKSUMS[checksum], digest[:length])


def _check_overlap(tensors: Sequence[MegaTensor]) -> None:
    places = sorted(
        (span.offset, span.stored, tensor.name)
        for tensor in tensors
        for span in tensor.spans
        if span.stored
    )
    end, before = 0, ""
    for offset, stored, name in places:
        if offset < end:
            raise FormatError(f"the payloads of {before[:80]!r} and {name[:80]!r} overlap")
        end, before = offset + stored, name
