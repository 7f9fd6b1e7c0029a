"""Data files that are valid safetensors files, with no pickle anywhere.

A value is typed JSON in a U8 tensor. A box of a tensor is named by its key, with its offsets
where it is not the whole tensor. Complex numbers without a code of their own are pairs.
"""

from __future__ import annotations

import binascii
import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.formats.safetensors import TensorEntry, encode_header
from dcp_pipeline.formats.typed_json import decode, encode
from dcp_pipeline.serialization.base import FileImage, Serialization
from dcp_pipeline.types.entries import Item
from dcp_pipeline.types.memory import segments_of

__all__ = ["SafetensorsSerialization"]

_BYTES: dict[type[bytes] | type[bytearray], tuple[bytes, bytes]] = {
    kind: (f'{{"${kind.__name__}":"'.encode(), b'"}') for kind in (bytes, bytearray)
}
"""What stands before and behind the base64 of a value that is nothing but bytes."""

_STEP_BYTES = 3 << 20


class SafetensorsSerialization(Serialization):
    """One safetensors file per data file."""

    kind: ClassVar[str] = "safetensors"
    extension: ClassVar[str] = ".safetensors"
    dcp_reads: ClassVar[bool] = False

    def check_name(self, name: str) -> None:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(
                "a value whose key has a lone surrogate, which safetensors cannot hold"
            ) from error

    def encode_value(self, value: Any) -> bytes:
        if type(value) in _BYTES:
            return _encode_bytes(value)
        return encode(value)

    def decode_value(self, data: bytes) -> Any:
        for kind, (head, tail) in _BYTES.items():
            if data.startswith(head) and data.endswith(tail):
                # Anything odd is left to the decoder that explains it.
                with contextlib.suppress(binascii.Error):
                    content = memoryview(data)[len(head) : -len(tail)]
                    found = binascii.a2b_base64(content, strict_mode=True)
                    return found if kind is bytes else kind(found)
        return decode(data)

    def image(self, items: Sequence[Item]) -> FileImage:
        length = np.asarray([_nbytes(item) for item in items], np.int64)
        taken: set[str] = set()
        entries = [
            TensorEntry(
                _unique(_name(item), taken),
                item.dtype or "uint8",
                item.sizes if item.dtype else (int(nbytes),),
                int(nbytes),
            )
            for item, nbytes in zip(items, length, strict=True)
        ]
        header, offsets = encode_header(entries, {"format": "pt"})
        offset = np.asarray(offsets, np.int64)

        def segments() -> Iterator[memoryview]:
            yield memoryview(header)
            for item in items:
                if isinstance(item.data, bytes):
                    yield memoryview(item.data)
                else:
                    yield from segments_of(item.data)

        size = len(header) + int(length.sum())
        return FileImage(size, offset, length, np.zeros_like(length), segments)


def _encode_bytes(value: bytes | bytearray) -> bytes:
    """As ``typed_json.encode``, without holding the text several times."""
    head, tail = _BYTES[type(value)]
    out, view = io.BytesIO(), memoryview(value)
    out.write(head)
    for start in range(0, len(view), _STEP_BYTES):
        out.write(binascii.b2a_base64(view[start : start + _STEP_BYTES], newline=False))
    out.write(tail)
    return out.getvalue()


def _nbytes(item: Item) -> int:
    if item.dtype is None:
        return len(item.data)
    return int(np.prod(item.sizes, dtype=np.int64)) * ITEM_SIZES[item.dtype]


def _name(item: Item) -> str:
    if item.sizes == item.shape or item.dtype is None:
        return item.name
    return f"{item.name}@{','.join(map(str, item.offsets))}"


def _unique(name: str, taken: set[str]) -> str:
    number, unique = 1, name
    while unique in taken or unique == "__metadata__":
        number += 1
        unique = f"{name}~{number}"
    taken.add(unique)
    return unique
