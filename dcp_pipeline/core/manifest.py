"""``manifest.json``: the commit record of a checkpoint, read and written without torch.

A JSON object, one member per line, the last of which is a digest of all bytes before it. The
format is described for other readers in ``docs/format.md``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_pipeline.core.checksum import ALGORITHMS, MAX_BLOCK_BYTES, digest_of
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    NewerFormatError,
    UnsafeCheckpointError,
)
from dcp_pipeline.core.fingerprint import Fingerprint, decode_fingerprint, encode_fingerprint
from dcp_pipeline.core.packing import pack_columns, unpack_columns
from dcp_pipeline.core.path import Path, check_paths, decode_path, encode_path
from dcp_pipeline.core.places import check_places
from dcp_pipeline.core.quantized import QuantizedKeys, decode_quantized, encode_quantized
from dcp_pipeline.core.spans import SpansByRow, decode_spans, encode_spans
from dcp_pipeline.core.table import MAX_DIMENSIONS, ChunkTable, KeySpec, Kind

__all__ = [
    "FileEntry",
    "Manifest",
    "MetadataEntry",
    "SumsEntry",
    "check_places",
    "decode_keys",
    "encode_key",
    "safe_name",
    "safe_relative_name",
]

FORMAT: Final = "dcp_pipeline.checkpoint"
VERSION: Final = (1, 1)
_CHUNK_COLUMNS: Final = ("key", "owner", "file", "offset", "length", "payload")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A data file: its name in the directory and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SumsEntry:
    """A file of block digests: name, size in bytes and its own digest, hexadecimal."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """DCP's ``.metadata`` as this save wrote it: size in bytes and digest, hexadecimal."""

    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint holds and where.

    Attributes:
        save_id: 32 hexadecimal digits, new for every save; empty for a checkpoint of plain DCP.
        created: seconds since the epoch.
        world_size: ranks that saved.
        versions: of the packages that saved.
        config: the pipeline's config, as plain data.
        serialization, layout: their kinds.
        checksum: algorithm of the block digests, ``None`` where there are none.
        block_bytes: bytes per block.
        names: the stored name of each key of ``table``.
        table: every chunk; rows sorted by key, then by offsets.
        empty: path and ``dict``, ``list`` or ``tuple`` of containers that held nothing.
        files, sums: what lies in the directory.
        metadata: the ``.metadata`` written along, if any.
        superseded: digest of the ``.metadata`` that this save replaces, if there was one.
        notes: what the caller wants to know of the checkpoint later, as plain JSON data.
        fingerprint: of the values, ``None`` where none was taken.
        encoded: rows of ``table`` whose bytes are not simply their elements.
        quantized: keys of ``table`` that are stored as codes and scales.
        inline: values that no file has as bytes of their own, as a part of a foreign pickle: their
            bytes as the serialization would have stored them. Their keys have no rows.
        strided: rows of foreign files whose elements are not in row-major order, and the strides
            that they have, in elements; ``offset`` is then the first element's.
    """

    save_id: str
    created: float
    world_size: int
    serialization: str
    layout: str
    names: tuple[str, ...]
    table: ChunkTable
    files: tuple[FileEntry, ...]
    sums: tuple[SumsEntry, ...] = ()
    checksum: str | None = None
    block_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    empty: tuple[tuple[Path, str], ...] = ()
    metadata: MetadataEntry | None = None
    superseded: str | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Fingerprint | None = None
    encoded: SpansByRow = field(default_factory=dict)
    quantized: QuantizedKeys = field(default_factory=dict)
    inline: Mapping[int, bytes] = field(default_factory=dict)
    strided: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_foreign(self) -> bool:
        """Whether this describes a checkpoint of others, which has no manifest."""
        return not self.save_id

    def encode(self) -> bytes:
        """The bytes of ``manifest.json``."""
        members: dict[str, object] = {
            "format": FORMAT,
            "version": list(VERSION),
            "save_id": self.save_id,
            "created": self.created,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "serialization": self.serialization,
            "layout": self.layout,
            "checksum": {"algorithm": self.checksum, "block_bytes": self.block_bytes},
            "metadata": None if self.metadata is None else _plain(self.metadata),
            "superseded": self.superseded,
            "config": dict(self.config),
            "notes": dict(self.notes),
            "fingerprint": self.fingerprint and encode_fingerprint(self.fingerprint, self.names),
            "keys": [encode_key(*row) for row in zip(self.names, self.table.keys, strict=True)],
            "empty": [[encode_path(path), kind] for path, kind in self.empty],
            "files": [[entry.name, entry.size] for entry in self.files],
            "sums": [[entry.name, entry.size, entry.digest] for entry in self.sums],
            "chunks": {
                "count": len(self.table),
                "packed": base64.b64encode(
                    pack_columns(self.table.columns(*_CHUNK_COLUMNS))
                ).decode(),
            },
        }
        if self.encoded:
            members["encoded"] = encode_spans(self.encoded)
        if self.quantized:
            members["quantized"] = encode_quantized(self.quantized)
        if self.inline:
            members["inline"] = [
                [key, base64.b64encode(data).decode()] for key, data in self.inline.items()
            ]
        if self.strided:
            members["strided"] = [[row, list(steps)] for row, steps in self.strided.items()]
        lines = [
            f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"
            for name, value in members.items()
        ]
        body = ("{" + ",\n".join(lines)).encode()
        return body + b',\n"digest":"' + digest_of("xxh3_64", body).hex().encode() + b'"}\n'

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read ``manifest.json``, checking everything that can be checked without the files.

        Raises:
            NewerFormatError: of a newer major version.
            ChecksumError: the digest does not fit.
            FormatError: not a manifest, or one that contradicts itself.
            UnsafeCheckpointError: a file name that leads out of the directory.
        """
        members = _parse(data)
        try:
            return _decode(members)
        except CheckpointError:
            raise
        except Exception as error:  # whatever members of other types make the reader trip over
            raise FormatError(
                f"manifest.json is damaged: {type(error).__name__} {error}"
            ) from error


def safe_name(name: object) -> str:
    """``name`` if it is a plain file name.

    Raises:
        UnsafeCheckpointError: it is absolute, has a directory part, or is ``.`` or ``..``.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name:
        raise UnsafeCheckpointError(
            f"the checkpoint names the file {name!r}, which is no plain name inside its directory"
        )
    if "\0" in name or len(name) > 255:
        raise UnsafeCheckpointError(f"not a file name: {name[:80]!r}")
    return name


def safe_relative_name(name: object) -> str:
    """``name`` if it is a plain file name, or several with ``/`` between them.

    Raises:
        UnsafeCheckpointError: it is absolute, or a part of it is no plain name.
    """
    if not isinstance(name, str) or len(name) > 4096:
        raise UnsafeCheckpointError(f"not a file name: {str(name)[:80]!r}")
    for part in name.split("/"):
        try:
            safe_name(part)
        except UnsafeCheckpointError:
            raise UnsafeCheckpointError(
                f"the checkpoint names the file {name[:300]!r}, which is no path inside its"
                " directory"
            ) from None
    return name


def _plain(entry: MetadataEntry) -> dict[str, object]:
    return {"size": entry.size, "digest": entry.digest}


def encode_key(name: str, spec: KeySpec) -> dict[str, object]:
    """A key as plain JSON data."""
    encoded: dict[str, object] = {"name": name, "path": encode_path(spec.path)}
    if spec.kind is not Kind.TENSOR:
        encoded["kind"] = spec.kind.value
    if spec.dtype is not None:
        encoded |= {"dtype": spec.dtype, "shape": list(spec.shape)}
    if spec.alias >= 0:
        encoded["alias"] = spec.alias
    return encoded


def _parse(data: bytes) -> dict[str, Any]:
    end = data.rfind(b',\n"digest":"')
    try:
        members = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"manifest.json is not JSON: {error}") from error
    if not isinstance(members, dict) or members.get("format") != FORMAT:
        raise FormatError(f"manifest.json is not a {FORMAT} record")
    version = members.get("version")
    if not isinstance(version, list) or not version or type(version[0]) is not int:
        raise FormatError(f"manifest.json has no version: {version!r}")
    if version[0] > VERSION[0]:
        raise NewerFormatError(
            f"manifest.json is of format version {version}, this package reads up to"
            f" {VERSION[0]}.x: install a newer dcp-pipeline"
        )
    tail = b',\n"digest":"' + digest_of("xxh3_64", data[: max(end, 0)]).hex().encode() + b'"}\n'
    if end < 0 or data[end:] != tail:
        raise ChecksumError(
            "manifest.json does not match its own digest: it was changed or cut off"
        )
    return members


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a member stands twice")
    return result


def _decode(members: dict[str, Any]) -> Manifest:
    names, specs = decode_keys(members["keys"])
    packed = base64.b64decode(members["chunks"]["packed"], validate=True)
    table = ChunkTable.from_columns(specs, unpack_columns(packed))
    if len(table) != members["chunks"]["count"]:
        raise FormatError(f"{len(table)} chunks, {members['chunks']['count']} are announced")
    checksum, superseded = members["checksum"], members.get("superseded")
    algorithm, block_bytes = checksum["algorithm"], _size(checksum["block_bytes"])
    if algorithm is not None and (
        algorithm not in ALGORITHMS or not 1 <= block_bytes <= MAX_BLOCK_BYTES
    ):
        raise FormatError(f"digests of kind {algorithm!r} over {block_bytes} bytes")
    metadata = members.get("metadata")
    save_id = _save_id(members["save_id"])
    # Our own saves make no folders; other people's repositories have them.
    file_name = safe_name if save_id else safe_relative_name
    manifest = Manifest(
        save_id=save_id,
        created=float(members["created"]),
        world_size=int(members["world_size"]),
        serialization=str(members["serialization"]),
        layout=str(members["layout"]),
        names=names,
        table=table,
        files=tuple(FileEntry(file_name(name), _size(size)) for name, size in members["files"]),
        sums=tuple(
            SumsEntry(safe_name(name), _size(size), str(digest))
            for name, size, digest in members["sums"]
        ),
        checksum=algorithm,
        block_bytes=block_bytes,
        versions={str(k): str(v) for k, v in members["versions"].items()},
        config=dict(members["config"]),
        empty=tuple((decode_path(path), _container(kind)) for path, kind in members["empty"]),
        metadata=None
        if metadata is None
        else MetadataEntry(_size(metadata["size"]), str(metadata["digest"])),
        superseded=None if superseded is None else str(superseded),
        notes=dict(members.get("notes") or {}),
        fingerprint=decode_fingerprint(members.get("fingerprint"), names, specs),
        encoded=decode_spans(members["encoded"]) if "encoded" in members else {},
        quantized=decode_quantized(members.get("quantized") or ()),
        inline={
            _size(key): base64.b64decode(data, validate=True)
            for key, data in members.get("inline") or ()
        },
        strided={
            _size(row): tuple(map(_size, steps)) for row, steps in members.get("strided") or ()
        },
    )
    check_places(manifest)
    return manifest


def decode_keys(rows: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], tuple[KeySpec, ...]]:
    """Names and keys from what :func:`encode_key` makes of them, checked as far as they go.

    Raises:
        FormatError: they contradict themselves. Members of other types make whatever error.
    """
    names, specs = [], []
    for row in rows:
        dtype, shape = row.get("dtype"), tuple(_size(extent) for extent in row.get("shape", ()))
        if dtype is not None and dtype not in ITEM_SIZES:
            raise FormatError(f"{row['name']!r} has the unknown dtype {dtype!r}")
        if len(shape) > MAX_DIMENSIONS:
            raise FormatError(f"{row['name']!r} has {len(shape)} dimensions")
        alias = row.get("alias", -1)
        if type(alias) is not int or not -1 <= alias < len(rows):
            raise FormatError(f"{row['name']!r} shares storage with a key that is not there")
        kind = Kind(row.get("kind", Kind.TENSOR))
        if (kind in (Kind.VALUE, Kind.STREAM)) != (dtype is None):
            raise FormatError(f"{row['name']!r} is a {kind} of dtype {dtype!r}")
        path = decode_path(row["path"])
        if not path:
            raise FormatError(f"{row['name']!r} lies nowhere in the state")
        names.append(str(row["name"]))
        specs.append(KeySpec(path, kind, dtype, shape, alias))
    if len(set(names)) != len(names):
        raise FormatError("two keys have the same name")
    for name, spec in zip(names, specs, strict=True):
        target = specs[spec.alias]
        if spec.alias >= 0 and (
            spec.dtype is None
            or target.alias >= 0
            or (spec.dtype, spec.shape) != (target.dtype, target.shape)
        ):
            raise FormatError(f"{name!r} cannot share the storage of {names[spec.alias]!r}")
    check_paths([spec.path for spec in specs])
    return tuple(names), tuple(specs)


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise FormatError(f"not a size: {value!r}")
    return value


def _save_id(value: object) -> str:
    # Empty where a rank passes on what it found of plain DCP.
    is_hex = isinstance(value, str) and not set(value) - set("0123456789abcdef")
    if not isinstance(value, str) or not is_hex or len(value) not in (0, 32):
        raise FormatError(f"not a save id: {value!r}")
    return value


def _container(kind: object) -> str:
    if kind not in ("dict", "list", "tuple"):
        raise FormatError(f"not a container: {kind!r}")
    return str(kind)
