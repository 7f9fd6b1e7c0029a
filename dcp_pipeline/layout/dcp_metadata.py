"""DCP's ``Metadata`` from a manifest, and a manifest from DCP's ``Metadata``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from dcp_pipeline.core.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_pipeline.core.manifest import FileEntry, Manifest, safe_name
from dcp_pipeline.core.path import Component, Index, Path
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
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

__all__ = ["manifest_of", "metadata_of"]


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
    for key, (name, spec) in enumerate(zip(manifest.names, table.keys, strict=True)):
        source = spec.alias if spec.alias >= 0 else key
        planner_data[name] = _dcp_path(spec.path)
        rows = range(int(starts[source]), int(starts[source + 1]))
        width = len(spec.shape)
        chunks = []
        for position, row in enumerate(rows):
            offset = None if spec.dtype is None else torch.Size(offsets[row][:width])
            file, begin, length = places[row]
            index = MetadataIndex(name, offset, position)
            storage[index] = _StorageInfo(manifest.files[file].name, begin, length)
            if offset is not None:
                chunks.append(ChunkStorageMetadata(offset, torch.Size(sizes[row][:width])))
        state[name] = (
            BytesStorageMetadata()
            if spec.dtype is None
            else TensorStorageMetadata(
                TensorProperties(dtype=DTYPES[spec.dtype]), torch.Size(spec.shape), chunks
            )
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
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    reader = _Reader(metadata, file_sizes)
    for name, stored in metadata.state_dict_metadata.items():
        reader.add(name, stored, _path_of(paths.get(name), name))
    return reader.manifest()


def _path_of(path: Any, name: str) -> Path:
    if not isinstance(path, tuple) or not path:
        return (name,)
    parts: list[Component] = [Index(p) if isinstance(p, int) else str(p) for p in path]
    return tuple(parts)


class _Reader:
    """Gathers the rows of a manifest while the entries of a ``Metadata`` are read."""

    def __init__(self, metadata: Metadata, file_sizes: Mapping[str, int]) -> None:
        if not isinstance(metadata.storage_data, dict):
            raise CorruptCheckpointError(".metadata does not say where its items are stored")
        self._storage: dict[MetadataIndex, Any] = metadata.storage_data
        self._file_sizes = file_sizes
        self._files: dict[str, int] = {}
        self._names: list[str] = []
        self._keys: list[KeySpec] = []
        self._key: list[int] = []
        self._offsets: list[tuple[int, ...]] = []
        self._sizes: list[tuple[int, ...]] = []
        self._places: list[tuple[int, int, int]] = []

    def add(self, name: str, stored: Any, path: Path) -> None:
        if isinstance(stored, TensorStorageMetadata):
            dtype = dtype_name(stored.properties.dtype)
            if dtype is None:
                raise CorruptCheckpointError(f"{name!r} has dtype {stored.properties.dtype}")
            self._append_key(name, KeySpec(path, Kind.TENSOR, dtype, tuple(stored.size)))
            for chunk in stored.chunks:
                if 0 not in chunk.sizes:
                    index = MetadataIndex(name, chunk.offsets)
                    self._append_row(name, index, tuple(chunk.offsets), tuple(chunk.sizes))
        else:
            self._append_key(name, KeySpec(path, Kind.VALUE))
            self._append_row(name, MetadataIndex(name), (), ())

    def _append_key(self, name: str, spec: KeySpec) -> None:
        self._names.append(name)
        self._keys.append(spec)

    def _append_row(
        self, name: str, index: MetadataIndex, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        info = self._storage.get(index)
        if info is None:
            raise CorruptCheckpointError(f".metadata does not say where {name!r} at {offsets} lies")
        if getattr(info, "transform_descriptors", None):
            raise CorruptCheckpointError(
                f"{name!r} was written through the stream transforms {info.transform_descriptors},"
                " which this reader does not know"
            )
        self._key.append(len(self._keys) - 1)
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

    def manifest(self) -> Manifest:
        table = ChunkTable.build(self._keys, self._key, self._offsets, self._sizes)
        places = np.asarray(self._places, np.int64).reshape(-1, 3)
        table = replace(table, file=places[:, 0], offset=places[:, 1], length=places[:, 2])
        return Manifest(
            save_id="",
            created=0.0,
            world_size=0,
            serialization="torch_save",
            layout="dcp",
            names=tuple(self._names),
            table=table.sort(),
            files=tuple(FileEntry(name, self._file_sizes.get(name, -1)) for name in self._files),
        )
