"""DCP's ``.metadata``: a pickle that is read without running anything it names.

The globals that DCP has ever written are enumerated here. Each stands for a small function of ours
that checks its arguments and makes the object; a file cannot reach any other code.
"""

from __future__ import annotations

import gc
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError, UnsupportedLeafError
from dcp_pipeline.core.shown import shown
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.pickle_values import Factory, key_types, plain_globals

__all__ = ["read_metadata", "write_metadata"]

_LIMIT = 1 << 63
_DCP = "torch.distributed.checkpoint.metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_MEMORY_FORMAT_NAMES = (
    "TORCH_CONTIGUOUS_FORMAT",
    "TORCH_CHANNELS_LAST",
    "TORCH_PRESERVE_FORMAT",
)
_LAYOUTS = {
    str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
_KEYS = key_types(MetadataIndex, torch.Size, PurePosixPath, PureWindowsPath)


def read_metadata(data: bytes) -> Metadata:
    """The ``Metadata`` that DCP (ours or torch's, any version) pickled into ``.metadata``.

    ``planner_data`` is plain containers, a path in ``storage_meta`` a ``PurePath``. Attributes that
    torch does not know are kept.

    Args:
        data: the bytes of the file.

    Raises:
        FormatError: the file is malformed or is no ``Metadata``.
        UnsafeCheckpointError: it names a global that DCP never writes, or a file out of the
            checkpoint.
    """
    # Millions of objects that all live on: the collector would walk them again and again, which
    # takes three times as long as making them.
    collecting = gc.isenabled()
    gc.disable()
    try:
        metadata = load_inert(data, _resolve, builders=_BUILDERS, keys=_KEYS)
        if type(metadata) is not Metadata:
            raise FormatError(f".metadata holds a {type(metadata).__name__}, expected a Metadata")
        _check_metadata(metadata)
    finally:
        if collecting:
            gc.enable()
    return metadata


def write_metadata(metadata: Metadata) -> bytes:
    """Pickle ``metadata`` so that plain ``torch.distributed.checkpoint.load`` reads it.

    Raises:
        UnsupportedLeafError: it holds something that cannot be pickled.

    Example:
        >>> read_metadata(write_metadata(Metadata({"step": BytesStorageMetadata()})))
        Metadata(state_dict_metadata={'step': BytesStorageMetadata()}, planner_data=None, \
storage_data=None, storage_meta=None, version=None)
    """
    try:
        return pickle.dumps(metadata, protocol=4)
    except Exception as error:  # pickling runs code of any class, which may raise anything
        raise UnsupportedLeafError(
            f"the metadata cannot be pickled: {type(error).__name__}: {error}"
        ) from error


def _resolve(module: str, name: str) -> object:
    known = _GLOBALS.get(f"{module}.{name}")
    if known is None and module == "torch":
        known = _DTYPES.get(name)
    if known is None:
        raise UnsafeCheckpointError(
            f".metadata asks for {module}.{name}, which the metadata of a checkpoint never needs"
        )
    return known


def _new(cls: type) -> Factory:
    create: Callable[..., object] = cls.__new__

    def make(args: tuple[Any, ...]) -> object:
        if args:
            raise FormatError(f"a {cls.__name__} is made with arguments, which DCP never does")
        return create(cls)

    return Factory(cls.__name__, make)


def _size(args: tuple[Any, ...]) -> torch.Size:
    values = args[0] if args else ()
    if len(args) > 1 or type(values) not in (tuple, list):
        raise FormatError("a torch.Size of something that is not a tuple")
    for value in values:
        if type(value) is not int or not 0 <= value < _LIMIT:
            raise FormatError(f"a torch.Size holds {shown(value, 40)}, expected 0 to 2**63 - 1")
    return torch.Size(values)


def _layout(args: tuple[Any, ...]) -> torch.layout:
    layout = _LAYOUTS.get(args[0]) if len(args) == 1 and type(args[0]) is str else None
    if layout is None:
        raise FormatError(f"the layout {shown(args)} is unknown")
    return layout


def _memory_format(args: tuple[Any, ...]) -> torch.memory_format:
    if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] <= 2:
        raise FormatError(f"the memory format {shown(args)} is unknown")
    return _MEMORY_FORMATS[args[0]]


def _member(args: tuple[Any, ...]) -> torch.memory_format:
    # Some releases of Python pickle a member of an enum as getattr(enum, name).
    owner, name = args
    if type(owner) is not Factory or owner.make is not _memory_format:
        raise UnsafeCheckpointError(".metadata asks for builtins.getattr of something unknown")
    if name not in _MEMORY_FORMAT_NAMES:
        raise FormatError(f"the memory format {shown(name)} is unknown")
    return _MEMORY_FORMATS[_MEMORY_FORMAT_NAMES.index(name)]


class _Plan:
    """A part of a plan to save, which Megatron-core keeps in the metadata; nothing of it counts."""


def _path(cls: type[PurePath]) -> Factory:
    def make(args: tuple[Any, ...]) -> PurePath:
        if not all(type(part) is str for part in args):
            raise FormatError("a path of something that is not text")
        return cls(*args)

    return Factory(cls.__name__, make)


def _state(state: Any, owner: object) -> dict[str, Any]:
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]  # with slots, of which there are none
    if type(state) is not dict:
        raise FormatError(f"the state of a {type(owner).__name__} is a {type(state).__name__}")
    for name in state:
        # A name like __reduce__ would shadow what Python looks up on instances.
        if type(name) is not str or name.startswith("__") or not name.isidentifier():
            raise FormatError(f"a {type(owner).__name__} with the attribute {shown(name)}")
    return state


def _need(state: dict[str, Any], owner: object, **kinds: type | tuple[type, ...]) -> None:
    for name, kind in kinds.items():
        value = state.get(name)
        if type(value) is not kind and not (type(kind) is tuple and type(value) in kind):
            raise FormatError(
                f"{name} of a {type(owner).__name__} is a {type(value).__name__}: {shown(value)}"
            )


_CHUNK = {"offsets", "sizes"}
_INDEX = {"fqn", "offset", "index"}
_OFFSET, _HINT = (torch.Size, type(None)), (int, type(None))
_INSIDE = re.compile(r"(?!.:)[^/\\\0][^\\\0]*", re.DOTALL)  # no absolute path, no drive, no NUL
_INFO = {"relative_path", "offset", "length"}


def _build_chunk(chunk: ChunkStorageMetadata, state: Any) -> None:
    known = state if type(state) is dict and state.keys() == _CHUNK else _state(state, chunk)
    if type(known.get("offsets")) is not torch.Size or type(known.get("sizes")) is not torch.Size:
        _need(known, chunk, offsets=torch.Size, sizes=torch.Size)
    if len(known["offsets"]) != len(known["sizes"]):
        raise FormatError(f"a chunk at {known['offsets']} has the sizes {known['sizes']}")
    chunk.__dict__.update(known)


def _build_tensor(tensor: TensorStorageMetadata, state: Any) -> None:
    known = _state(state, tensor)
    _need(known, tensor, properties=TensorProperties, size=torch.Size, chunks=list)
    tensor.__dict__.update(known)


def _build_properties(properties: TensorProperties, state: Any) -> None:
    if type(state) is not tuple or len(state) != 5:
        raise FormatError("the state of TensorProperties is not its five fields")
    dtype, layout, requires_grad, memory_format, pin_memory = state
    kinds = (torch.dtype, torch.layout, bool, torch.memory_format, bool)
    for value, kind in zip(state, kinds, strict=True):
        if type(value) is not kind:
            raise FormatError(
                f"TensorProperties holds a {type(value).__name__}, expected a {kind.__name__}"
            )
    properties.dtype = dtype
    properties.layout = layout
    properties.requires_grad = requires_grad
    properties.memory_format = memory_format
    properties.pin_memory = pin_memory


def _build_bytes(item: BytesStorageMetadata, state: Any) -> None:
    item.__dict__.update(_state(state, item))


def _build_index(index: MetadataIndex, state: Any) -> None:
    known = state if type(state) is dict and state.keys() <= _INDEX else _state(state, index)
    if (
        type(known.get("fqn")) is not str
        or type(known.get("offset")) not in _OFFSET
        or type(known.get("index")) not in _HINT
    ):
        _need(known, index, fqn=str, offset=_OFFSET, index=_HINT)
    if "fqn" in index.__dict__:  # it may be a key already, which must not change
        raise FormatError(f"the state of the index of {index.fqn!r} is set twice")
    index.__dict__.update(known)


def _build_info(info: _StorageInfo, state: Any) -> None:
    known = state if type(state) is dict and state.keys() == _INFO else _state(state, info)
    path, offset, length = known.get("relative_path"), known.get("offset"), known.get("length")
    if type(path) is not str or type(offset) is not int or type(length) is not int:
        raise FormatError(f"a _StorageInfo of {shown(path)}, {shown(offset)}, {shown(length)}")
    if _INSIDE.fullmatch(path) is None or (".." in path and ".." in path.split("/")):
        raise UnsafeCheckpointError(f".metadata names a file out of the checkpoint: {path[:200]!r}")
    if not 0 <= offset < _LIMIT or not 0 <= length < _LIMIT:
        raise FormatError(f".metadata claims impossible bytes of {path[:200]!r}")
    transforms = known.get("transform_descriptors")
    if transforms is not None and not (
        type(transforms) in (list, tuple) and all(type(name) is str for name in transforms)
    ):
        raise FormatError(f"transform_descriptors of {path[:200]!r} are no list of names")
    info.__dict__.update(known)


def _build_meta(meta: StorageMeta, state: Any) -> None:
    known = _state(state, meta)
    paths = (str, PurePosixPath, PureWindowsPath, type(None))
    _need(known, meta, checkpoint_id=paths, save_id=(str, type(None)), load_id=(str, type(None)))
    known.setdefault("modules", [])
    meta.__dict__.update(known)


def _build_metadata(metadata: Metadata, state: Any) -> None:
    metadata.__dict__.update(_state(state, metadata))


def _check_metadata(metadata: Metadata) -> None:
    found = vars(metadata)
    _need(found, metadata, state_dict_metadata=dict, storage_data=(dict, type(None)))
    _need(found, metadata, storage_meta=(StorageMeta, type(None)), version=(str, type(None)))
    for key, item in metadata.state_dict_metadata.items():
        if type(key) is not str or type(item) not in (TensorStorageMetadata, BytesStorageMetadata):
            raise FormatError(f"state_dict_metadata[{shown(key)}] is a {type(item).__name__}")
        if type(item) is TensorStorageMetadata:
            _check_tensor(key, vars(item))
    for index, info in (metadata.storage_data or {}).items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise FormatError(f"storage_data maps a {type(index).__name__} to a "
                              f"{type(info).__name__}")  # fmt: skip
        if "relative_path" not in vars(info):
            raise FormatError(f"storage_data[{index.fqn!r}] names no file")
    meta = metadata.storage_meta
    if meta is not None and "modules" not in vars(meta):
        raise FormatError("storage_meta has no state")


def _check_tensor(key: str, state: dict[str, Any]) -> None:
    if "properties" not in state or "dtype" not in vars(state["properties"]):
        raise FormatError(f"state_dict_metadata[{key[:80]!r}] has no properties")
    dimensions = len(state["size"])
    for chunk in state["chunks"]:
        if type(chunk) is not ChunkStorageMetadata or "sizes" not in vars(chunk):
            raise FormatError(f"a chunk of {key[:80]!r} is a {type(chunk).__name__}")
        if len(chunk.sizes) != dimensions:
            raise FormatError(
                f"a chunk of {key[:80]!r} has the sizes {chunk.sizes}, the tensor {state['size']}"
            )


def _globals() -> dict[str, object]:
    known = plain_globals(_KEYS)
    classes: tuple[type, ...] = (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )
    known.update((f"{_DCP}.{cls.__name__}", _new(cls)) for cls in classes)
    known["torch.distributed.checkpoint.filesystem._StorageInfo"] = _new(_StorageInfo)
    known[f"{_OLD}.TensorProperties"] = _new(TensorProperties)
    formats = Factory("_MEM_FORMAT_ENCODING", _memory_format)
    known[f"{_DCP}._MEM_FORMAT_ENCODING"] = formats
    known[f"{_OLD}.MEM_FORMAT_ENCODING"] = formats
    known["builtins.getattr"] = Factory("getattr", _member)
    known["torch.Size"] = Factory("torch.Size", _size, of_counts=True)
    known["torch.serialization._get_layout"] = Factory("_get_layout", _layout)
    for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"):
        known[f"torch.distributed.checkpoint.planner.{name}"] = Factory(name, lambda _: _Plan())
    # Subclasses that Megatron-core had until 0.15.
    known[f"{_MEGATRON}.MCoreMetadata"] = _new(Metadata)
    known[f"{_MEGATRON}.MCoreSavePlan"] = Factory("MCoreSavePlan", lambda _: _Plan())
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            known[f"{module}.{name}"] = _path(PurePosixPath)
        for name in ("WindowsPath", "PureWindowsPath"):
            known[f"{module}.{name}"] = _path(PureWindowsPath)
    return known


_GLOBALS = _globals()
_BUILDERS: dict[type, Callable[[Any, Any], None]] = {
    BytesStorageMetadata: _build_bytes,
    ChunkStorageMetadata: _build_chunk,
    Metadata: _build_metadata,
    MetadataIndex: _build_index,
    StorageMeta: _build_meta,
    TensorProperties: _build_properties,
    TensorStorageMetadata: _build_tensor,
    _Plan: lambda plan, state: None,
    _StorageInfo: _build_info,
    OrderedDict: lambda mapping, state: None,  # attributes of a dict are no data
}
