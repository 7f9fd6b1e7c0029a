"""What a value's pickle asks for, looked at before ``torch.load`` does it.

The guarded reader of torch admits calls that cost a few bytes in a file and gigabytes in memory
(``bytearray(4 << 30)``, a storage of any size), and keys that take forever to hash. Here the pickle
is gone through with stand-ins that only know how large the real things would be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.shown import shown
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.pickle_values import Factory, key_types, plain_globals
from dcp_pipeline.formats.tensor_frame import TYPED_STORAGES
from dcp_pipeline.formats.zip_directory import Window, payload_offset, read_directory

__all__ = ["StoredPickle", "ValueGlobals", "globals_of_value", "pickle_of_value"]

_MAX_ENTRIES = 1_000_000
_FREE_BYTES, _RATIO = 64 << 20, 16
_WIDEST = 16  # bytes of an element
_QUANTIZED = {"QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1,
              "QUInt2x4Storage": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValueGlobals:
    """What a value names.

    Attributes:
        named: all globals.
        unknown: those that torch's guarded reader does not admit by itself.
    """

    named: frozenset[str]
    unknown: frozenset[str]


@dataclass(frozen=True, slots=True)
class StoredPickle:
    """The pickle of a value, and the records beside it.

    Attributes:
        data: the pickle.
        records: sizes of the zip's entries by name.
        prefix: of the names of those that are storages.
    """

    data: bytes
    records: Mapping[str, int]
    prefix: str


def pickle_of_value(window: Window) -> StoredPickle:
    """Find the pickle in an item.

    Raises:
        FormatError: it is no item that ``torch.save`` wrote.
        UnsafeCheckpointError: a zip of absurdly many entries.
    """
    entries = read_directory(window, _MAX_ENTRIES)
    root = entries[0].name.partition("/")[0] if entries else ""
    record = next((entry for entry in entries if entry.name == f"{root}/data.pkl"), None)
    if record is None:
        raise FormatError("a zip without data.pkl: not what torch.save writes")
    data = window.take(payload_offset(window, record), record.size)
    return StoredPickle(data, {entry.name: entry.size for entry in entries}, f"{root}/data/")


def globals_of_value(pickle: StoredPickle) -> ValueGlobals:
    """Go through the pickle of a value, and say what it names.

    Raises:
        FormatError: it is malformed.
        UnsafeCheckpointError: it asks for memory out of proportion to its own bytes, or for keys
            that cannot be hashed in time.
    """
    guard = _Guard(pickle)
    load_inert(pickle.data, guard.resolve, builders=_BUILDERS, persistent=guard.storage, keys=_KEYS)
    return ValueGlobals(frozenset(guard.named), frozenset(guard.unknown))


class _Opaque:
    """What a global makes that only the user knows, or whose size does not matter."""


@dataclass(frozen=True, slots=True)
class _StorageType:
    width: int


@dataclass(frozen=True, eq=False, slots=True)
class _Storage:
    width: int
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class _Tensor:
    """A tensor of so many elements, which may be more than its storage holds."""

    numel: int


class _TensorClass:
    """A class of tensors, which is named and never called."""


_KEYS = key_types(
    _Opaque, _StorageType, _Tensor, _TensorClass, Factory, frozenset, torch.Size, torch.dtype
)
_BUILDERS: dict[type, Callable[[Any, Any], None]] = {
    _Opaque: lambda opaque, state: None,
    OrderedDict: lambda mapping, state: None,
}


class _Guard:
    """Stand-ins for what one pickle names."""

    def __init__(self, pickle: StoredPickle) -> None:
        self._records = pickle.records
        self._prefix = pickle.prefix
        self._storages: dict[str, _Storage] = {}
        self._left = _FREE_BYTES + _RATIO * sum(pickle.records.values())
        self.named: set[str] = set()
        self.unknown: set[str] = set()

    def resolve(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        self.named.add(full)
        if full in _PLAIN:
            return _PLAIN[full]
        if module in ("torch", "torch.cuda") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if module in ("torch", "torch.cuda", "torch.sparse", "torch.cuda.sparse") and (
            name.endswith("Tensor")
        ):
            return _TensorClass()
        if full in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
            return Factory(name, self._tensor)
        if full == "torch._utils._rebuild_tensor_v3":
            return Factory(name, self._tensor)
        if full == "torch._utils._rebuild_qtensor":
            return Factory(name, self._quantized)
        if full in (
            "torch._utils._rebuild_device_tensor_from_cpu_tensor",
            "torch._utils._rebuild_device_tensor_from_numpy",
        ):
            return Factory(name, self._converted)
        if full == "torch._tensor._rebuild_from_type_v2":
            return Factory(name, _from_type)
        if full not in _SMALL:
            self.unknown.add(full)
        return Factory(full, lambda args: _Opaque())

    def storage(self, reference: object) -> _Storage:
        """A storage, which cannot be larger than its record."""
        if type(reference) is not tuple or len(reference) != 5 or reference[0] != "storage":
            raise FormatError("a pickle refers to something that is not a storage")
        _, kind, key, _, numel = reference
        if type(kind) is not _StorageType or type(key) is not str:
            raise FormatError("a pickle refers to a storage without type or key")
        if key not in self._storages:
            nbytes = _count(numel) * kind.width
            size = self._records.get(self._prefix + key)
            if size is None:
                raise FormatError(f"a zip without the record data/{key}")
            if nbytes > size:
                raise FormatError(f"a storage of {nbytes} bytes in a record of {size} bytes")
            self._storages[key] = _Storage(kind.width, nbytes)
        return self._storages[key]

    def _tensor(self, args: tuple[Any, ...]) -> _Tensor:
        storage, offset, sizes, strides = args[:4]
        if type(storage) is not _Storage:
            raise FormatError("a tensor is rebuilt of something that is not a storage")
        numel = self._numel(sizes, storage)
        if numel:
            steps = zip(_counts(sizes), _counts(strides), strict=True)
            last = _count(offset) + sum((size - 1) * stride for size, stride in steps)
            # A packed element may be less than a byte, so nothing but elements is compared.
            if last >= max(storage.nbytes, 1):
                raise FormatError(f"a tensor reaches out of its {storage.nbytes} bytes")
        return _Tensor(numel)

    def _quantized(self, args: tuple[Any, ...]) -> _Tensor:
        self._spend(self._numel(args[2], args[0]) * _WIDEST)
        return _Tensor(self._numel(args[2], args[0]))

    def _converted(self, args: tuple[Any, ...]) -> object:
        if type(args[0]) is _Tensor:
            self._spend(args[0].numel * _WIDEST)
        return args[0]

    def _numel(self, sizes: object, storage: object) -> int:
        numel = prod(_counts(sizes))
        nbytes = storage.nbytes if type(storage) is _Storage else 0
        # An expanded tensor costs nothing until somebody copies it.
        if numel > _FREE_BYTES + _RATIO * nbytes:
            raise UnsafeCheckpointError(
                f"an item of {nbytes} bytes asks for a tensor of {numel} elements"
            )
        return numel

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise UnsafeCheckpointError(
                "an item asks for memory out of proportion to its own bytes"
            )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise FormatError(f"{shown(value, 40)} where a count was expected")
    return value


def _counts(values: object) -> tuple[int, ...]:
    if type(values) not in (tuple, list, torch.Size):
        raise FormatError(f"a {type(values).__name__} where sizes were expected")
    return tuple(map(_count, values))  # type: ignore[call-overload]


def _from_type(args: tuple[Any, ...]) -> object:
    function, arguments = args[0], args[2]
    if type(function) is not Factory or type(arguments) is not tuple:
        raise UnsafeCheckpointError("a pickle rebuilds a tensor by something unknown")
    return function.make(arguments)


def _buffer(args: tuple[Any, ...]) -> bytes:
    if args and type(args[0]) is int:
        raise UnsafeCheckpointError(f"an item asks for a buffer of {args[0]} bytes")
    if len(args) == 1 and type(args[0]) in (bytes, bytearray):
        return b""
    encode = _PLAIN["_codecs.encode"]
    assert type(encode) is Factory
    return bytes(encode.make(args)) if args else b""  # type: ignore[call-overload]


def _counter(args: tuple[Any, ...]) -> _Opaque:
    if args and type(args[0]) is not dict:
        raise FormatError("a pickle builds a Counter of something else than a dict")
    return _Opaque()


def _size(args: tuple[Any, ...]) -> torch.Size:
    return torch.Size(_counts(args[0])) if args else torch.Size()


def _parameter(args: tuple[Any, ...]) -> object:
    return args[0] if args and type(args[0]) is _Tensor else _Opaque()


def _plain() -> dict[str, object]:
    known: dict[str, object] = plain_globals(_KEYS)
    makers: dict[str, Callable[[tuple[Any, ...]], object]] = {
        "builtins.bytearray": _buffer,
        "builtins.bytes": _buffer,
        "collections.Counter": _counter,
        "torch.Size": _size,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch.nn.parameter.Parameter": _parameter,
    }
    known.update((name, Factory(name, make)) for name, make in makers.items())
    known["torch.storage.UntypedStorage"] = _StorageType(1)
    known["torch.storage.TypedStorage"] = _TensorClass()
    return known


_PLAIN = _plain()
_STORAGES = {
    **{name: _StorageType(dtype.itemsize) for name, dtype in TYPED_STORAGES.items()},
    **{name: _StorageType(width) for name, width in _QUANTIZED.items()},
}
# What else torch admits: of the size of its arguments, or of none.
_SMALL = {
    "torch.serialization._get_layout",
    "torch.device",
    "torch.per_tensor_affine",
    "torch.per_tensor_symmetric",
    "torch.per_channel_affine",
    "torch.per_channel_symmetric",
    "torch.per_channel_affine_float_qparams",
    "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass",
}
