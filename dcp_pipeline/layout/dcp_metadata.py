"""DCP's ``Metadata`` from a manifest, and a manifest from DCP's ``Metadata``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from dcp_pipeline.core.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_pipeline.core.hashing import EqualHashes
from dcp_pipeline.core.manifest import FileEntry, Manifest, safe_name
from dcp_pipeline.core.path import Component, Index, Path, check_paths
from dcp_pipeline.core.shown import shown
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.layout.names import rank_metadata_name
from dcp_pipeline.types.dcp import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_pipeline.types.dtypes import DTYPES, dtype_name

__all__ = ["keys_of", "manifest_of", "manifest_of_ranks", "metadata_of"]


def metadata_of(manifest: Manifest, location: str) -> Metadata:
    """What plain DCP needs to read the data files of ``manifest``.

    A key that shares another's storage gets the same chunks under its own name.
    """
    table = manifest.table
    starts = np.searchsorted(table.key, np.arange(len(table.keys) + 1))
    offsets, sizes = table.offsets.tolist(), table.sizes.tolist()
    places = np.stack([table.file, table.offset, table.length], axis=1).tolist()
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    planner_data = {}
    # Equal sizes and properties are one object, which a pickle holds once.
    size_of = cache(torch.Size)
    properties_of = cache(lambda dtype: TensorProperties(dtype=DTYPES[dtype]))
    for key, (name, spec) in enumerate(zip(manifest.names, table.keys, strict=True)):
        source = spec.alias if spec.alias >= 0 else key
        planner_data[name] = _dcp_path(spec.path)
        rows = range(int(starts[source]), int(starts[source + 1]))
        width = len(spec.shape)
        chunks = []
        for position, row in enumerate(rows):
            offset = None if spec.dtype is None else size_of(tuple(offsets[row][:width]))
            file, begin, length = places[row]
            index = MetadataIndex(name, offset, position)
            storage[index] = _StorageInfo(manifest.files[file].name, begin, length)
            if offset is not None:
                chunks.append(ChunkStorageMetadata(offset, size_of(tuple(sizes[row][:width]))))
        state[name] = (
            BytesStorageMetadata()
            if spec.dtype is None
            else TensorStorageMetadata(properties_of(spec.dtype), size_of(spec.shape), chunks)
        )
    return Metadata(
        state_dict_metadata=state,
        planner_data=planner_data,
        storage_data=storage,
        storage_meta=StorageMeta(checkpoint_id=location, save_id=manifest.save_id),
        version=CURRENT_DCP_VERSION,
    )


def _dcp_path(path: Path) -> tuple[str | int, ...]:
    return tuple(part.position if isinstance(part, Index) else str(part) for part in path)


def manifest_of(metadata: Metadata, file_sizes: Mapping[str, int]) -> Manifest:
    """A checkpoint of plain DCP as a manifest, without digests and with payloads not yet known.

    Args:
        file_sizes: bytes of each file in the directory.

    Raises:
        CorruptCheckpointError: the metadata contradicts itself or names a file that is not there.
        UnsafeCheckpointError: it names a file outside the directory.
    """
    reader = _Reader(file_sizes)
    reader.add(metadata, ".metadata")
    return reader.manifest(world_size=0)


def manifest_of_ranks(metadata: Sequence[Metadata], file_sizes: Mapping[str, int]) -> Manifest:
    """What the ranks of a save with ``use_collectives=False`` have written, as one manifest.

    Keys of all ranks, and their chunks united. What several ranks have written, replicas and Python
    values, is taken from the lowest of them.

    Args:
        metadata: of each rank, in rank order.

    Raises:
        CorruptCheckpointError: ranks give a key different shapes or dtypes, or as above.
        UnsafeCheckpointError: as above.
    """
    reader = _Reader(file_sizes)
    for rank, part in enumerate(metadata):
        reader.add(part, rank_metadata_name(rank), rank)
    return reader.manifest(world_size=len(metadata))


def _path_of(path: Any, name: str) -> Path:
    if not isinstance(path, tuple) or not path:
        return (name,)
    parts: list[Component] = []
    for part in path:
        if type(part) is not str and not (type(part) is int and 0 <= part < 1 << 62):
            found = shown(part, 40) if type(part) is int else f"a {type(part).__name__}"
            raise CorruptCheckpointError(
                f"{name!r} lies at {found} of something, expected a name or a position in a list"
            )
        parts.append(Index(part) if isinstance(part, int) else str(part))
    return tuple(parts)


@dataclass(frozen=True)
class _Record:
    """A file of metadata: its name, the rank that it is of, and what it says of places."""

    name: str
    rank: int
    storage: Mapping[MetadataIndex, Any]


class _Reader:
    """Gathers the rows of a manifest while the entries of ``Metadata`` are read."""

    def __init__(self, file_sizes: Mapping[str, int]) -> None:
        self._file_sizes = file_sizes
        self._files: dict[str, int] = {}
        self._keys: dict[str, int] = {}
        self._specs: list[KeySpec] = []
        self._key: list[int] = []
        self._owner: list[int] = []
        self._offsets: list[tuple[int, ...]] = []
        self._sizes: list[tuple[int, ...]] = []
        self._places: list[tuple[int, int, int]] = []

    def add(self, metadata: Metadata, name: str, rank: int = 0) -> None:
        """Take what the file ``name`` of ``rank`` says beyond what was added before."""
        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(f"{name} does not say where its items are stored")
        record = _Record(name, rank, metadata.storage_data)
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        EqualHashes().add(zip(self._key, self._offsets, self._sizes, strict=True))
        known = set(zip(self._key, self._offsets, self._sizes, strict=True))
        for key_name, stored in metadata.state_dict_metadata.items():
            spec = _spec_of(key_name, stored, _path_of(paths.get(key_name), key_name))
            key = self._key_of(key_name, spec, record)
            for index, offsets, sizes in _boxes(key_name, stored):
                if (key, offsets, sizes) not in known:
                    self._add_row(key, index, offsets, sizes, record)

    def _key_of(self, name: str, spec: KeySpec, record: _Record) -> int:
        key = self._keys.setdefault(name, len(self._specs))
        if key == len(self._specs):
            self._specs.append(spec)
        known = self._specs[key]
        if (known.dtype, known.shape) != (spec.dtype, spec.shape):
            raise CorruptCheckpointError(
                f"{name!r} is {spec.dtype or 'a value'} {list(spec.shape)} in {record.name},"
                f" {known.dtype or 'a value'} {list(known.shape)} on a rank before: the files are"
                " not of one save, or each rank has kept something of its own under that key"
            )
        return key

    def _add_row(
        self,
        key: int,
        index: MetadataIndex,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        record: _Record,
    ) -> None:
        info, name = record.storage.get(index), index.fqn
        if info is None:
            raise CorruptCheckpointError(
                f"{record.name} does not say where {name!r} at {offsets} lies"
            )
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{name!r} was written through the stream transforms {info.transform_descriptors},"
                " which this reader does not know"
            )
        self._key.append(key)
        self._owner.append(record.rank)
        self._offsets.append(offsets)
        self._sizes.append(sizes)
        self._places.append((self._file(info.relative_path, name), info.offset, info.length))

    def _file(self, relative_path: Any, name: str) -> int:
        text = str(relative_path)
        if PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise UnsafeCheckpointError(
                f".metadata places {name!r} in {text!r}, outside the checkpoint"
            )
        return self._files.setdefault(safe_name(text), len(self._files))

    def manifest(self, world_size: int) -> Manifest:
        """Everything that was added."""
        check_paths([spec.path for spec in self._specs])
        table = ChunkTable.build(self._specs, self._key, self._offsets, self._sizes)
        places = np.asarray(self._places, np.int64).reshape(-1, 3)
        table = replace(
            table,
            owner=np.asarray(self._owner, np.int64),
            file=places[:, 0],
            offset=places[:, 1],
            length=places[:, 2],
        )
        return Manifest(
            save_id="",
            created=0.0,
            world_size=world_size,
            serialization="torch_save",
            layout="dcp",
            names=tuple(self._keys),
            table=table.sort(),
            files=tuple(FileEntry(name, self._file_sizes.get(name, -1)) for name in self._files),
        )


def keys_of(metadata: Metadata) -> list[KeySpec]:
    """The keys alone.

    Raises:
        CorruptCheckpointError: a key lies nowhere, or has a dtype that no checkpoint can hold.
    """
    paths = metadata.planner_data or {}
    return [
        _spec_of(name, stored, _path_of(paths.get(name), name))
        for name, stored in metadata.state_dict_metadata.items()
    ]


def _spec_of(name: str, stored: Any, path: Path) -> KeySpec:
    if not isinstance(stored, TensorStorageMetadata):
        return KeySpec(path, Kind.VALUE)
    dtype = dtype_name(stored.properties.dtype)
    if dtype is None:
        raise CorruptCheckpointError(f"{name!r} has dtype {stored.properties.dtype}")
    return KeySpec(path, Kind.TENSOR, dtype, tuple(stored.size))


def _boxes(
    name: str, stored: Any
) -> Iterator[tuple[MetadataIndex, tuple[int, ...], tuple[int, ...]]]:
    """Index, offsets and sizes of everything with elements that is stored under ``name``."""
    if not isinstance(stored, TensorStorageMetadata):
        yield MetadataIndex(name), (), ()
        return
    for chunk in stored.chunks:
        if 0 not in chunk.sizes:
            yield MetadataIndex(name, chunk.offsets), tuple(chunk.offsets), tuple(chunk.sizes)
