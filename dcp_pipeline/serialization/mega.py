"""Data files that are valid MEGA files, with no pickle anywhere.

A value is a key/value of the file, of a type of the format's own where one fits exactly, and else
typed JSON. A box of a tensor is named by its key, with its offsets where it is not the whole
tensor; a key/value says which box of which tensor it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, ClassVar, Final

import numpy as np
import torch

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.core.spans import Span
from dcp_pipeline.formats import mega_values
from dcp_pipeline.formats.mega_encode import Header, MegaEntry, dtype_code, encode_mega
from dcp_pipeline.formats.mega_keys import BOXES_KEY, FORMAT, FORMAT_KEY, value_key
from dcp_pipeline.formats.typed_json import encode
from dcp_pipeline.serialization.base import FileImage, Serialization
from dcp_pipeline.serialization.mega_packing import Kept, Packing
from dcp_pipeline.types.entries import Item
from dcp_pipeline.types.memory import segments_of

__all__ = ["MegaSerialization"]

# The format finds its footer by what stands 68 bytes before the end of a file: no elements may.
_TAIL: Final = bytes(68)
_MULTIPLE = 16  # of every size of an element


class MegaSerialization(Serialization):
    """One MEGA file per data file.

    Args:
        checksum: of the format itself: ``none``, ``crc32`` or ``sha256``. It stands before the
            elements, which are therefore looked at twice.
        chunk_bytes: tensors with more bytes are cut into chunks, each compressed by itself and with
            its checksum.
        alignment: of the first element in the file, bytes.
        compression: ``none`` or ``zstd``; what does not get smaller by it is stored as it is.
        level: of zstd.
        shuffle: group bytes by their place in their element before they are compressed.
    """

    kind: ClassVar[str] = "mega"
    extension: ClassVar[str] = ".mega"
    dcp_reads: ClassVar[bool] = False

    def __init__(
        self,
        checksum: str = "crc32",
        chunk_bytes: int = 16 << 20,
        alignment: int = 4096,
        compression: str = "none",
        level: int = 3,
        shuffle: bool = False,
    ) -> None:
        self._packing = Packing(
            checksum="" if checksum == "none" else checksum,
            chunk_bytes=chunk_bytes // _MULTIPLE * _MULTIPLE,
            level=level if compression == "zstd" else None,
            shuffle=shuffle,
        )
        self._alignment = alignment

    def within(self, nbytes: int) -> tuple[Serialization, int]:
        if self._packing.level is None:
            return self, nbytes
        other = copy(self)
        other._packing = replace(self._packing, kept_bytes=nbytes // 2)
        return other, nbytes - nbytes // 2

    def check_name(self, name: str) -> None:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(
                "a value whose key has a lone surrogate, which MEGA cannot hold"
            ) from error

    def check_dtype(self, dtype_name: str) -> None:
        dtype_code(dtype_name)

    def encode_value(self, value: Any) -> bytes:
        if type(value) is not str or not (value.startswith(mega_values.JSON) or _is_torn(value)):
            encoded = mega_values.encode_value(value)
            if encoded is not None:
                return encoded
        return _encoded(mega_values.JSON + encode(value).decode("ascii"))

    def decode_value(self, data: bytes) -> Any:
        return mega_values.decode_leaf(data)

    def image(self, items: Sequence[Item]) -> FileImage:
        tensors = [item for item in items if item.dtype is not None]
        kept = Kept(self._packing.kept_bytes)
        entries, size = self._entries(tensors, kept)
        values = {value_key(item.name): item.data for item in items if isinstance(item.data, bytes)}
        own = _boxes(entries, tensors) | {FORMAT_KEY: _encoded(FORMAT)}
        header = encode_mega(entries, values | own, self._alignment)
        start = len(header.data)

        def segments() -> Iterator[memoryview]:
            yield memoryview(header.data)
            for item, entry in zip(tensors, entries, strict=True):
                views, width = segments_of(_tensor(item)), ITEM_SIZES[entry.dtype_name]
                yield from self._packing.stored(views, width, list(entry.spans), kept)
            yield memoryview(_TAIL)

        columns = np.asarray(_places(items, entries, header), np.int64).reshape(-1, 2)
        return FileImage(
            start + size + len(_TAIL),
            columns[:, 0].copy(),
            columns[:, 1].copy(),
            np.zeros(len(items), np.int64),
            segments,
            _encoded_items(items, entries, start),
        )

    def _entries(self, tensors: Sequence[Item], kept: Kept) -> tuple[list[MegaEntry], int]:
        """The tensors of a file, and the stored bytes of all."""
        taken: set[str] = set()
        entries, offset = [], 0
        for item in tensors:
            assert item.dtype is not None
            width = ITEM_SIZES[item.dtype]
            nbytes = int(np.prod(item.sizes, dtype=np.int64)) * width
            views = segments_of(_tensor(item))
            spans = self._packing.spans(views, nbytes, width, offset, kept)
            name = _unique(_name(item), taken)
            entries.append(MegaEntry(name, item.dtype, item.sizes, tuple(spans)))
            offset = spans[-1].offset + spans[-1].stored
        return entries, offset


def _tensor(item: Item) -> torch.Tensor:
    assert not isinstance(item.data, bytes)
    return item.data


def _encoded_items(
    items: Sequence[Item], entries: Sequence[MegaEntry], start: int
) -> dict[int, tuple[Span, ...]]:
    """The items whose bytes are not simply their elements, with places in the file."""
    rows = [row for row, item in enumerate(items) if item.dtype is not None]
    return {
        row: tuple(replace(span, offset=start + span.offset) for span in entry.spans)
        for row, entry in zip(rows, entries, strict=True)
        if not all(span.is_plain for span in entry.spans)
    }


def _is_torn(text: str) -> bool:
    """Whether text has half a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _boxes(entries: Sequence[MegaEntry], tensors: Sequence[Item]) -> dict[str, bytes]:
    """The key/value that says of what the parts are parts."""
    found = {
        entry.name: [item.name, list(item.offsets), list(item.shape)]
        for entry, item in zip(entries, tensors, strict=True)
        if item.sizes != item.shape or entry.name != item.name
    }
    return {BOXES_KEY: _encoded(json.dumps(found, separators=(",", ":")))} if found else {}


def _encoded(value: object) -> bytes:
    encoded = mega_values.encode_value(value)
    assert encoded is not None
    return encoded


def _places(
    items: Sequence[Item], entries: Sequence[MegaEntry], header: Header
) -> list[tuple[int, int]]:
    """Where each item lies in the file, and its bytes."""
    places, tensors = [], iter(entries)
    for item in items:
        if isinstance(item.data, bytes):
            places.append(header.values[value_key(item.name)])
        else:
            spans = next(tensors).spans
            begin = len(header.data) + spans[0].offset
            places.append((begin, spans[-1].offset + spans[-1].stored - spans[0].offset))
    return places


def _name(item: Item) -> str:
    if item.sizes == item.shape:
        return item.name
    return f"{item.name}@{','.join(map(str, item.offsets))}"


def _unique(name: str, taken: set[str]) -> str:
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}~{number}"
    taken.add(unique)
    return unique
