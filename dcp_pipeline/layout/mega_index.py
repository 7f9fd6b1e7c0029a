"""``model.mega.index.json``: which shards there are, and which of them holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, Final

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.manifest import safe_relative_name
from dcp_pipeline.formats.bounded_json import parse_object

__all__ = ["FORMAT", "MAX_INDEX_BYTES", "MegaIndex", "encode_index", "parse_index"]

FORMAT: Final = "mega-sharded-index-v1"
MAX_INDEX_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class MegaIndex:
    """What an index says.

    Attributes:
        files: the shards, sorted.
        weight_map: tensor to shard; ``None`` where the index has no such table.
        metadata: whatever else it holds.
    """

    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    metadata: Mapping[str, Any]


def parse_index(data: bytes, name: str) -> MegaIndex:
    """An index of ``weight_map``, of ``shards``, or of both tables.

    ``shards`` may say where its writer had put a shard: an absolute path is taken for the name of
    the shard beside the index, if it ends so, and for nothing else.

    Raises:
        FormatError: no index, or its tables contradict each other.
        UnsafeCheckpointError: a path that leads out of the directory, or absurd sizes.
    """
    members = parse_object(data, name, most_bytes=MAX_INDEX_BYTES, most_values=1 << 23)
    metadata = members.get("metadata", {})
    tables = {table: members.get(table) for table in ("weight_map", "shards")}
    for table, rows in tables.items():
        if rows is not None and not (
            isinstance(rows, dict) and all(isinstance(file, str) for file in rows.values())
        ):
            raise FormatError(f"{name}: {table} is no table of names")
    weight_map, shards = tables["weight_map"], tables["shards"]
    if not isinstance(metadata, dict) or (weight_map is None and shards is None):
        raise FormatError(f"{name} has neither weight_map nor shards")
    of_shards = {_shard(key, path, name) for key, path in (shards or {}).items()}
    of_map = {safe_relative_name(file) for file in set((weight_map or {}).values())}
    if weight_map is not None and shards is not None and of_map - of_shards:
        raise FormatError(
            f"{name}: weight_map names {min(of_map - of_shards)!r}, which is not among its shards"
        )
    return MegaIndex(tuple(sorted(of_shards | of_map)), weight_map, metadata)


def _shard(key: str, path: str, index: str) -> str:
    is_absolute = PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()
    if not is_absolute:
        return safe_relative_name(path)
    if PureWindowsPath(path).name != key:
        raise UnsafeCheckpointError(
            f"{index} places the shard {key[:80]!r} at {path[:200]!r}, outside the checkpoint"
        )
    return safe_relative_name(key)


def encode_index(
    weight_map: Mapping[str, str], files: list[str], metadata: Mapping[str, Any]
) -> bytes:
    """An index with both tables, of relative names."""
    members = {
        "metadata": {**metadata, "format": FORMAT},
        "weight_map": dict(sorted(weight_map.items())),
        "shards": {file: file for file in files},
    }
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"
