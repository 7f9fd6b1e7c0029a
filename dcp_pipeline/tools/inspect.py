"""What a checkpoint holds, from its commit record alone: no tensor is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout import names
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.opening import (
    OVERWRITTEN,
    Found,
    is_ours,
    look,
    open_directory,
    read_manifest,
)

__all__ = ["FileInfo", "Inspection", "KeyInfo", "Summary", "files_of", "inspect"]


@dataclass(frozen=True, slots=True)
class Summary:
    """A checkpoint as a whole; what plain DCP does not record is ``None``.

    Attributes:
        path: its directory.
        kind: ``dcp_pipeline``, or ``plain DCP`` for one that our package did not write.
        save_id: 32 hexadecimal digits.
        created: seconds since the epoch.
        world_size: ranks that saved.
        versions: of the packages that saved.
        serialization: kind, such as ``torch_save``.
        checksum: algorithm of the block digests.
        block_bytes: bytes per digest.
        keys, chunks, files: how many; ``files`` are data files.
        tensor_bytes: bytes of all elements, shared storage counted once.
        file_bytes: bytes of the data files, as recorded.
        has_metadata: whether plain DCP opens the checkpoint too.
        config_digest: SHA-256 of the config that saved, as ``dcp-pipeline config`` shows it.
    """

    path: str
    kind: str
    save_id: str | None
    created: float | None
    world_size: int | None
    versions: Mapping[str, str]
    serialization: str
    checksum: str | None
    block_bytes: int | None
    keys: int
    chunks: int
    files: int
    tensor_bytes: int
    file_bytes: int
    has_metadata: bool
    config_digest: str | None


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """One key.

    Attributes:
        name: as it is stored.
        kind: ``tensor``, ``value``, ``array``, ``scalar`` or ``stream``.
        dtype: as torch names it, ``None`` for a value.
        shape: of the whole tensor, ``None`` for a value.
        chunks: in how many parts it is stored.
        nbytes: bytes of its elements, or of a value as it is stored.
        alias: the key whose storage it shares (tied weights), which then has the chunks.
        fingerprint: of its values, 16 hexadecimal digits; ``None`` where none is recorded.
    """

    name: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    chunks: int
    nbytes: int
    alias: str | None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of a checkpoint.

    Attributes:
        name: in the directory.
        role: ``data``, ``sums``, ``manifest``, ``metadata``, ``marker`` or ``other``.
        size: bytes that it has, ``None`` where it is missing.
        expected: bytes that it should have, ``None`` where nothing is recorded.
    """

    name: str
    role: str
    size: int | None
    expected: int | None

    @property
    def is_well(self) -> bool:
        """Whether it is there with the size that was recorded."""
        return not self.problem

    @property
    def problem(self) -> str:
        """What is wrong with it, empty where nothing is."""
        if self.size is None:
            return f"{self.name} is missing"
        if self.expected in (None, self.size):
            return ""
        return f"{self.name} has {self.size} bytes, {self.expected} were written"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        summary: of the whole.
        keys: in the order of the checkpoint.
        files: the commit record first, then data and digests.
        is_overwritten: whether plain DCP has saved over a checkpoint of ours.
        fingerprint: of all values, 64 hexadecimal digits; ``None`` where none is recorded.
    """

    summary: Summary
    keys: tuple[KeyInfo, ...]
    files: tuple[FileInfo, ...]
    is_overwritten: bool
    fingerprint: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong: files that are not there or have another size, another save on top."""
        files = [file.problem for file in self.files if file.problem]
        return (*([OVERWRITTEN] if self.is_overwritten else []), *files)


def inspect(path: str | os.PathLike[str], keys: str = "*") -> Inspection:
    """Look at the checkpoint at ``path``; ours is read without torch.

    Args:
        path: a directory, or a ``file://`` URI.
        keys: a glob on the names of the keys to list; the summary is of all.

    Raises:
        ConfigError: a URI of another scheme.
        CheckpointNotFoundError: there is no checkpoint; ``IncompleteCheckpointError`` where one was
            begun.
        CorruptCheckpointError: naming what is damaged.
    """
    directory = open_directory(path)
    found = look(directory)
    manifest = read_manifest(directory, found)
    listed = _keys(manifest)
    return Inspection(
        _summary(directory, found, manifest, listed),
        tuple(key for key in listed if fnmatchcase(key.name, keys)),
        tuple(files_of(directory, found, manifest)),
        is_overwritten=manifest.is_foreign and found.has_manifest,
        fingerprint=None if manifest.fingerprint is None else manifest.fingerprint.value,
    )


def _summary(
    directory: Directory, found: Found, manifest: Manifest, keys: list[KeyInfo]
) -> Summary:
    ours = is_ours(manifest)
    return Summary(
        path=directory.location,
        kind=_kind(manifest),
        save_id=manifest.save_id or None,
        created=manifest.created if ours else None,
        world_size=manifest.world_size if ours else None,
        versions=dict(manifest.versions),
        serialization=manifest.serialization,
        checksum=manifest.checksum,
        block_bytes=manifest.block_bytes if ours else None,
        keys=len(keys),
        chunks=len(manifest.table),
        files=len(manifest.files),
        tensor_bytes=sum(key.nbytes for key in keys if key.dtype is not None and not key.alias),
        file_bytes=sum(max(file.size, 0) for file in manifest.files),
        has_metadata=found.has_metadata,
        config_digest=_digest(manifest.config) if manifest.config else None,
    )


def _digest(config: Mapping[str, Any]) -> str:
    # As PipelineConfig.digest, whose kinds may not be installed here.
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _keys(manifest: Manifest) -> list[KeyInfo]:
    table = manifest.table
    count = len(table.keys)
    chunks = np.bincount(table.key, minlength=count)
    values = np.zeros(count, np.int64)
    np.add.at(values, table.key, table.length)
    result = []
    for key, (name, spec) in enumerate(zip(manifest.names, table.keys, strict=True)):
        elements = int(np.prod(spec.shape, dtype=object)) * spec.item_size
        result.append(
            KeyInfo(
                name,
                spec.kind.value,
                spec.dtype,
                None if spec.dtype is None else spec.shape,
                int(chunks[key]),
                int(values[key]) if spec.dtype is None else elements,
                manifest.names[spec.alias] if spec.alias >= 0 else None,
                None if manifest.fingerprint is None else manifest.fingerprint.of(name),
            )
        )
    return result


def files_of(directory: Directory, found: Found, manifest: Manifest | None) -> list[FileInfo]:
    """The files that a commit record names, and whatever else lies in the directory."""
    expected: dict[str, int | None] = {}
    if manifest is not None:
        expected |= {file.name: file.size for file in manifest.files if file.size >= 0}
        expected |= {file.name: None for file in manifest.files if file.size < 0}
        expected |= {sums.name: sums.size for sums in manifest.sums}
    records: tuple[str, ...] = (names.MANIFEST, names.METADATA)
    listed = [name for name in records if name in found.names]
    listed += expected
    named = set(listed)
    others = [name for name in found.names if name not in named]
    # A lock is a link to nowhere, and what has just gone is no file of this checkpoint.
    listed += [n for n in others if os.path.isfile(os.path.join(directory.location, n))]
    known = {sums.name for sums in manifest.sums} if manifest is not None else set()
    return [
        FileInfo(name, _role(name, known), _size(directory, name), expected.get(name))
        for name in listed
    ]


def _role(name: str, sums: set[str]) -> str:
    if name == names.MANIFEST:
        return "manifest"
    if name == names.METADATA:
        return "metadata"
    if name in sums or (names.save_of(name) and name.endswith(".sums")):
        return "sums"
    if names.marker_save_id(name):
        return "marker"
    return "data" if names.is_data(name) else "other"


def _size(directory: Directory, name: str) -> int | None:
    try:
        return directory.size(name)
    except MissingFileError:
        return None


def _kind(manifest: Manifest) -> str:
    """Whose files they are."""
    others = {"mega": "MEGA", "huggingface": "Hugging Face"}
    return others.get(manifest.layout) or ("plain DCP" if manifest.is_foreign else "dcp_pipeline")
