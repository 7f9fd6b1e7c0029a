"""The container ``torch.save(tensor)`` writes, made and parsed without torch's own reader.

``frame_tensor`` gives the bytes around a payload that somebody streams; ``parse_tensor_zip`` finds
the payload in an item, so that it can be read straight into memory. ``read_value`` and
``write_value`` are for every other value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.shown import shown
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.pickle_values import Factory, key_types, plain_globals
from dcp_pipeline.formats.tensor_frame import NEW_DTYPES, TYPED_STORAGES, ZipFrame, frame_tensor
from dcp_pipeline.formats.torch_values import check_readable, read_value, write_value
from dcp_pipeline.formats.zip_directory import Window, payload_offset, read_directory

__all__ = [
    "MAX_STATE_ENTRIES",
    "MAX_STATE_PICKLE_BYTES",
    "TENSOR_GLOBALS",
    "Archive",
    "Rebuilt",
    "StorageType",
    "StoredTensor",
    "ZipFrame",
    "check_containers",
    "check_readable",
    "frame_tensor",
    "parse_state_zip",
    "parse_tensor_zip",
    "read_value",
    "storage_of",
    "write_value",
]

_MAX_ENTRIES = 64
_MAX_PICKLE_BYTES = 64 * 1024
MAX_STATE_ENTRIES = 1 << 18
MAX_STATE_PICKLE_BYTES = 32 << 20
# Each needs one byte of a pickle and sixty of memory; a tensor needs two or three in 200 bytes.
_FREE_CONTAINERS = 4096
_MAX_DIMENSIONS = 1024
_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the elements of a stored tensor lie.

    Attributes:
        dtype: its dtype.
        sizes: its sizes, in elements.
        strides: its strides, in elements.
        storage_offset: the element of the payload that is the tensor's first.
        payload_offset: where the payload (the whole storage) starts in the item, in bytes.
        payload_bytes: bytes of the payload.
        crc32: the CRC-32 the zip records. torch can be told to write an arbitrary one
            (``torch.serialization.set_crc32_options(False)``): only trust it in items we wrote.
    """

    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    payload_offset: int
    payload_bytes: int
    crc32: int | None

    @property
    def is_contiguous(self) -> bool:
        """Whether the payload is exactly the tensor's elements in C order."""
        is_whole = self.payload_bytes == prod(self.sizes) * self.dtype.itemsize
        return self.storage_offset == 0 and is_whole and self.is_row_major

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie one after another in C order, wherever in the payload."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected and 0 not in self.sizes:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages; of none in particular without a dtype."""

    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A tensor as its pickle describes it."""

    storage: _Storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def parse_tensor_zip(read: Callable[[int, int], bytes], length: int) -> StoredTensor:
    """Find the elements of a tensor that ``torch.save`` (1.6 or newer) or ``frame_tensor`` wrote.

    An item of at most 64 KiB is read whole, a longer one in two reads of a few KiB.

    Args:
        read: ``(offset, nbytes)`` to bytes of the item; offsets count from the item's start.
        length: bytes of the item.

    Raises:
        FormatError: the item is malformed or truncated, its numbers disagree, it is big endian, or
            it is a lazy conjugate or negative, which bytes alone cannot give (``read_value`` can).
        UnsafeCheckpointError: its pickle asks for something else than a plain tensor, or its sizes
            are absurd.
    """
    archive = Archive(read, length, _MAX_ENTRIES)
    pickle = archive.pickle(_MAX_PICKLE_BYTES)
    tensor = load_inert(
        pickle, _resolve, builders={}, persistent=storage_of, keys=key_types(StorageType)
    )
    return archive.locate(tensor)


def parse_state_zip(read: Callable[[int, int], bytes], length: int) -> dict[str, StoredTensor]:
    """Find the elements of all tensors of a flat state dict that ``torch.save`` (1.6 on) wrote.

    Tensors that share a storage have the same ``payload_offset``.

    Raises:
        FormatError, UnsafeCheckpointError: as :func:`parse_tensor_zip`, or there is something else
            in it than tensors by name.
    """
    archive = Archive(read, length, MAX_STATE_ENTRIES)
    pickle = archive.pickle(MAX_STATE_PICKLE_BYTES)
    check_containers(pickle)
    state = load_inert(
        pickle,
        _resolve,
        builders={OrderedDict: lambda made, metadata: None},  # versions of modules
        persistent=storage_of,
        keys=key_types(StorageType),
    )
    if not isinstance(state, dict):
        raise FormatError(f"a {type(state).__name__} where a state dict was expected")
    strange = [name for name in state if type(name) is not str]
    if strange:
        raise FormatError(f"a state dict with the key {shown(strange[0])}, expected text")
    for name in state:
        if not name.isascii() and name != name.encode("utf-8", "replace").decode():
            raise FormatError(f"a state dict with the key {name[:80]!r}, which is no text")
    return {name: archive.locate(tensor, f", under {name!r}") for name, tensor in state.items()}


def check_containers(pickle: bytes, per: int = 8) -> None:
    """Refuse a pickle that makes far more containers than it needs.

    Args:
        per: bytes that each has at least, but for the first few thousand.

    Raises:
        UnsafeCheckpointError: it does.
    """
    made = sum(map(pickle.count, (b"]", b"}", b"(")))
    if made > _FREE_CONTAINERS + len(pickle) // per:
        raise UnsafeCheckpointError(f"a pickle of {len(pickle)} bytes makes {made} containers")


class Archive:
    """The zip around tensors.

    Args:
        read: as for :func:`parse_tensor_zip`.
        length: bytes of it.
        max_entries: that it may have.
    """

    def __init__(self, read: Callable[[int, int], bytes], length: int, max_entries: int) -> None:
        self._window = Window(read, length)
        entries = read_directory(self._window, max_entries)
        self._entries = {entry.name: entry for entry in entries}
        self._root = entries[0].name.partition("/")[0] if entries else ""
        self._starts: dict[str, int] = {}

    def pickle(self, most: int) -> bytes:
        """What says which tensors there are, of at most so many bytes."""
        record = self._entries.get(f"{self._root}/data.pkl")
        if record is None:
            raise FormatError("a zip without data.pkl: not what torch.save writes")
        if record.size > most:
            raise UnsafeCheckpointError(f"the pickle of tensors claims {record.size} bytes")
        order = self._entries.get(f"{self._root}/byteorder")
        if order is not None:
            start = payload_offset(self._window, order)
            said = self._window.take(start, min(order.size, 16))
            if said != b"little":
                raise FormatError(f"byte order {said!r}: only little endian is read")
        return self._window.take(payload_offset(self._window, record), record.size)

    def locate(self, tensor: object, place: str = "") -> StoredTensor:
        """Where the elements of what the pickle holds lie."""
        if type(tensor) is not Rebuilt:
            raise FormatError(f"a {type(tensor).__name__} where a tensor was expected{place}")
        payload = self._entries.get(f"{self._root}/data/{tensor.storage.key}")
        if payload is None:
            raise FormatError(f"a zip without the record data/{tensor.storage.key}")
        _check_extent(tensor, payload.size)
        if payload.name not in self._starts:
            self._starts[payload.name] = payload_offset(self._window, payload)
        return StoredTensor(
            tensor.dtype, tensor.sizes, tensor.strides, tensor.offset,
            self._starts[payload.name], payload.size, payload.crc32,
        )  # fmt: skip


def _check_extent(tensor: Rebuilt, payload_bytes: int) -> None:
    width = 1 if tensor.storage.dtype is None else tensor.dtype.itemsize
    if tensor.storage.numel * width != payload_bytes:
        raise FormatError(
            f"a storage of {tensor.storage.numel} elements of {width} bytes in a record of "
            f"{payload_bytes} bytes"
        )
    if len(tensor.sizes) != len(tensor.strides):
        raise FormatError(f"{len(tensor.sizes)} sizes and {len(tensor.strides)} strides")
    if 0 in tensor.sizes:
        return
    last, numel = tensor.offset, 1
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        last += (size - 1) * stride
        numel *= size
    if numel >= _LIMIT:
        raise UnsafeCheckpointError(f"a tensor of sizes {tensor.sizes} has absurdly many elements")
    if (last + 1) * tensor.dtype.itemsize > payload_bytes:
        raise FormatError(
            f"a tensor of {tensor.dtype}, sizes {tensor.sizes}, strides {tensor.strides} and "
            f"offset {tensor.offset} reaches out of its {payload_bytes} bytes"
        )


def storage_of(reference: object) -> _Storage:
    """What a persistent id of a pickle stands for."""
    if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
        raise FormatError("a pickle refers to something that is not a storage")
    _, kind, key, _, numel = reference
    if type(kind) is not StorageType or type(key) is not str:
        raise FormatError("a pickle refers to a storage without type or key")
    return _Storage(kind.dtype, key, _count(numel))


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise FormatError(f"a {type(value).__name__} where a count was expected")
    if value >= _LIMIT:
        raise UnsafeCheckpointError("a tensor claims 2**63 elements or more")
    return value


def _counts(values: object) -> tuple[int, ...]:
    if type(values) is not tuple:
        raise FormatError(f"a {type(values).__name__} where sizes were expected")
    if len(values) > _MAX_DIMENSIONS:
        raise UnsafeCheckpointError(f"a tensor claims {len(values)} dimensions")
    return tuple(map(_count, values))


def _rebuilt(args: tuple[Any, ...], dtype: torch.dtype | None, rest: tuple[Any, ...]) -> Rebuilt:
    storage = args[0]
    if type(storage) is not _Storage or not isinstance(dtype, torch.dtype):
        raise FormatError("a tensor is rebuilt of something that is not a storage and a dtype")
    if len(rest) > 1 or (rest and rest[0]):
        raise FormatError("a tensor with metadata (a lazy conjugate or negative)")
    return Rebuilt(storage, _count(args[1]), _counts(args[2]), _counts(args[3]), dtype)


def _rebuild_v2(args: tuple[Any, ...]) -> Rebuilt:
    return _rebuilt(args, args[0].dtype, args[6:])


def _rebuild_v3(args: tuple[Any, ...]) -> Rebuilt:
    if args[0].dtype is not None:
        raise FormatError("a tensor with a dtype of its own in a storage with another one")
    return _rebuilt(args, args[6], args[7:])


def _rebuild_parameter(args: tuple[Any, ...]) -> Rebuilt:
    if type(args[0]) is not Rebuilt:
        raise FormatError("a parameter of something that is not a tensor")
    return args[0]


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    return _counts(tuple(args[0]) if args else ())


def _globals() -> dict[str, object]:
    plain = plain_globals(key_types())
    known: dict[str, object] = {
        "collections.OrderedDict": plain["collections.OrderedDict"],
        "torch.Size": Factory("torch.Size", _size),
        "torch._utils._rebuild_parameter": Factory("_rebuild_parameter", _rebuild_parameter),
        "torch._utils._rebuild_tensor_v2": Factory("_rebuild_tensor_v2", _rebuild_v2),
        "torch._utils._rebuild_tensor_v3": Factory("_rebuild_tensor_v3", _rebuild_v3),
        "torch.storage.UntypedStorage": StorageType(None),
    }
    known.update((f"torch.{name}", dtype) for name, dtype in NEW_DTYPES.items())
    known.update((f"torch.{name}", StorageType(dtype)) for name, dtype in TYPED_STORAGES.items())
    # torch.save of a dtype-less UntypedStorage view may name the older dtypes in v3 as well.
    known.update((str(dtype), dtype) for dtype in TYPED_STORAGES.values())
    return known


TENSOR_GLOBALS = _globals()


def _resolve(module: str, name: str) -> object:
    try:
        return TENSOR_GLOBALS[f"{module}.{name}"]
    except KeyError:
        raise UnsafeCheckpointError(
            f"the pickle of a tensor asks for {module}.{name}, which a plain tensor never needs"
        ) from None
