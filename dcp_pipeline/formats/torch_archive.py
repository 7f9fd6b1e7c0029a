"""The file that ``torch.save`` makes of a flat dict of tensors and values, made as a stream.

What is pickled is what ``torch.save`` pickles, so that ``torch.load(weights_only=True)`` opens it:
``torch._utils._rebuild_tensor_v2`` over storages by number, or ``_rebuild_tensor_v3`` for dtypes
that are younger than classes of storages. Storages follow, each with its CRC-32 behind it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.formats.tensor_frame import NEW_DTYPES, TYPED_STORAGES
from dcp_pipeline.formats.zip_records import end_record, small_entry, streamed_entry

__all__ = ["ArchivedTensor", "TorchArchive"]

_ALIGNMENT = 64
_STEP_BYTES = 1 << 20
_CLASSES = {dtype: getattr(torch, name) for name, dtype in TYPED_STORAGES.items()}


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A contiguous tensor of an archive.

    Attributes:
        dtype, sizes: its own.
        storage: number of the storage that it is the whole of; tensors that share memory have one.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    storage: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.sizes) * self.dtype.itemsize


class TorchArchive:
    """Everything about the file but the elements of its tensors.

    Args:
        state: tensors, and values that can be pickled, by name. Storages are numbered from 0 on in
            the order in which they first come.

    Attributes:
        size: bytes of the file.
        starts: where the elements of each storage start, a multiple of 64.

    Raises:
        UnsupportedLeafError: a dtype that torch's format cannot hold, or a value that cannot be
            pickled.

    Example:
        >>> made = TorchArchive({"w": ArchivedTensor(torch.int16, (2,), 0), "step": 3})
        >>> data = b"".join(made.segments(lambda number: [memoryview(bytes([1, 0, 2, 0]))]))
        >>> len(data) == made.size, torch.load(io.BytesIO(data), weights_only=True)
        (True, {'w': tensor([1, 2], dtype=torch.int16), 'step': 3})
    """

    def __init__(self, state: Mapping[str, ArchivedTensor | Any]) -> None:
        tensors = (held for held in state.values() if type(held) is ArchivedTensor)
        nbytes = {tensor.storage: tensor.nbytes for tensor in tensors}
        assert list(nbytes) == list(range(len(nbytes)))
        self._head, self._directory = _front(_pickled(state))
        self._entries, self.starts = [], list[int]()
        position = len(self._head)
        for number, size in nbytes.items():
            entry = streamed_entry(b"archive/data/%d" % number, size, position, _ALIGNMENT)
            self._entries.append(entry)
            self.starts.append(position + len(entry.local))
            position += len(entry.local) + size + entry.descriptor_bytes
        self._directory_start = position
        self.size = position + len(self._tail([0] * len(nbytes)))

    def segments(self, elements: Callable[[int], Iterator[memoryview]]) -> Iterator[memoryview]:
        """The bytes of the file in order; each view is valid until the next is asked for.

        Args:
            elements: of a storage, in row-major order, by its number.
        """
        yield memoryview(self._head)
        checksums: list[int] = []
        for number, entry in enumerate(self._entries):
            yield memoryview(entry.local)
            checksum = 0
            for view in elements(number):
                # Small steps: the bytes are still in the cache when they are written.
                for begin in range(0, len(view), _STEP_BYTES):
                    step = view[begin : begin + _STEP_BYTES]
                    checksum = crc32(step, checksum)
                    yield step
            yield memoryview(entry.descriptor(checksum))
            checksums.append(checksum)
        yield memoryview(self._tail(checksums))

    def _tail(self, checksums: Sequence[int]) -> bytes:
        pairs = zip(self._entries, checksums, strict=True)
        directory = self._directory + b"".join([entry.central(crc) for entry, crc in pairs])
        return directory + end_record(3 + len(self._entries), len(directory), self._directory_start)


def _front(data: bytes) -> tuple[bytes, bytes]:
    """The entries before the storages, and their part of the directory."""
    head = directory = b""
    for name, content in ((b"data.pkl", data), (b"byteorder", b"little"), (b"version", b"3\n")):
        local, central = small_entry(b"archive/" + name, content, len(head))
        head += local
        directory += central
    return head, directory


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for a storage while it is pickled."""

    reference: tuple[str, Any, str, str, int]


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.reference if type(value) is _Storage else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not ArchivedTensor:
            return NotImplemented
        key, strides = str(value.storage), _strides(value.sizes)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        kind = _CLASSES.get(value.dtype)
        if kind is not None:
            storage = _Storage(("storage", kind, key, "cpu", prod(value.sizes)))
            given = (storage, 0, value.sizes, strides, False, hooks)
            return _rebuild_tensor_v2, given
        storage = _Storage(("storage", torch.UntypedStorage, key, "cpu", value.nbytes))
        more = (storage, 0, value.sizes, strides, False, hooks, value.dtype)
        return _rebuild_tensor_v3, more


def _pickled(state: Mapping[str, Any]) -> bytes:
    for name, held in state.items():
        known = type(held) is not ArchivedTensor or held.dtype in _CLASSES
        if not known and held.dtype not in NEW_DTYPES.values():
            raise UnsupportedLeafError(f"{name!r} is a tensor of {held.dtype}, which torch.save"
                                       " cannot hold")  # fmt: skip
    buffer = io.BytesIO()
    try:
        # The protocol that torch's guarded reader knows.
        _Pickler(buffer, protocol=2).dump(dict(state))
    except Exception as error:  # pickling runs code of any class, which may raise anything
        raise UnsupportedLeafError(f"values that cannot be pickled: {error}") from error
    return buffer.getvalue()


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = list[int](), 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size or 1
    return tuple(reversed(strides))
