"""Kind ``torchsnapshot``: ``.snapshot_metadata`` says in which file, and where, each entry lies.

It is YAML, of late JSON. An entry is called ``{rank}/{path}``; ``%2F`` and ``%25`` in a component
stand for ``/`` and ``%``. Tensors are plain bytes (``buffer_protocol``) or items of ``torch.save``,
alone in a file or in a range of one; plain Python values lie in the metadata. Source:
``torchsnapshot/manifest.py``.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Component, Index, Path
from dcp_pipeline.formats.bounded_json import parse_object
from dcp_pipeline.formats.bounded_yaml import parse_yaml_object
from dcp_pipeline.layout.foreign.building import Building, Chunk
from dcp_pipeline.storage.base import Directory

__all__ = ["SNAPSHOT_METADATA", "open_torchsnapshot"]

SNAPSHOT_METADATA: Final = ".snapshot_metadata"

_MOST_BYTES: Final = 128 << 20
_MOST_VALUES: Final = 1 << 22
_SHARDED: Final = {"ShardedTensor": "shards", "DTensor": "shards", "ChunkedTensor": "chunks"}
_CONTAINERS: Final = ("dict", "OrderedDict", "list")
_LIMIT: Final = 1 << 62

Entry = Mapping[str, Any]


def open_torchsnapshot(directory: Directory) -> Manifest:
    """What a snapshot holds, of all ranks together.

    What all ranks share (replicated entries, sharded tensors) has no rank in its key; what a rank
    has of its own begins with ``rank{r}.`` where several have saved.

    Raises:
        FormatError: the metadata contradict themselves, or tensors overlap in a file.
        UnsafeCheckpointError: aliases, absurd sizes, files that lead out of the directory.
    """
    data = directory.read(SNAPSHOT_METADATA, 0, _MOST_BYTES + 1)
    parse = parse_object if data.lstrip()[:1] == b"{" else parse_yaml_object
    metadata = parse(data, SNAPSHOT_METADATA, most_bytes=_MOST_BYTES, most_values=_MOST_VALUES)
    world_size, entries = metadata.get("world_size"), metadata.get("manifest")
    if type(world_size) is not int or world_size < 1 or not isinstance(entries, dict):
        raise FormatError(f"{SNAPSHOT_METADATA} has no world_size and manifest")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise FormatError(f"{SNAPSHOT_METADATA} has {name[:200]!r} without a type")
    snapshot = _Snapshot(directory, entries, world_size)
    return snapshot.manifest()


class _Snapshot:
    def __init__(self, directory: Directory, entries: Mapping[str, Entry], world_size: int) -> None:
        self._building = Building(directory, "torchsnapshot")
        self._entries, self._world_size = entries, world_size
        self._sharded: dict[Path, list[tuple[str, Entry]]] = {}
        self._parents = {name.rpartition("/")[0] for name in entries}
        self._seen: set[Path] = set()
        self._taken: dict[int, list[tuple[int, int, str]]] = {}

    def manifest(self) -> Manifest:
        """Everything."""
        plain_lists = self._plain_lists()
        for name, entry in self._entries.items():
            parent = name.rpartition("/")[0]
            if parent in plain_lists:
                continue
            if name in plain_lists:
                values = [_primitive(self._entries[one], one) for one in plain_lists[name]]
                self._building.value(self._path(name, is_shared=False), values)
            else:
                self._add(name, entry)
        for path, parts in self._sharded.items():
            self._add_shards(path, parts)
        self._check_overlaps()
        return self._building.manifest()

    def _plain_lists(self) -> dict[str, list[str]]:
        """Lists that hold nothing but plain values, which are one value, and what is in them."""
        inside: dict[str, list[str]] = {}
        for name in self._entries:
            inside.setdefault(name.rpartition("/")[0], []).append(name)
        return {
            name: sorted(inside[name], key=_position)
            for name, entry in self._entries.items()
            if entry["type"] == "list"
            and name in inside
            and all(self._entries[one]["type"] in _PRIMITIVES for one in inside[name])
        }

    def _add(self, name: str, entry: Entry) -> None:
        kind = entry["type"]
        if kind in _CONTAINERS:
            if name not in self._parents:
                empty = "list" if kind == "list" else "dict"
                self._building.empty(self._path(name, False), empty)
            return
        is_shared = entry.get("replicated") is True or kind in ("ShardedTensor", "DTensor")
        path = self._path(name, is_shared)
        if kind in _SHARDED:
            self._sharded.setdefault(path, []).append((name, entry))
            return
        if is_shared and path in self._seen:
            return
        self._seen.add(path)
        if kind in _PRIMITIVES:
            self._building.value(path, _primitive(entry, name))
        elif kind == "object":
            if entry.get("serializer") != "torch_save":
                raise FormatError(f"{name!r} is serialized by {str(entry.get('serializer'))[:80]}")
            file, begin, length = self._place(entry, name)
            self._building.stored_value(path, file, begin, length)
        elif kind == "Tensor":
            shape = _integers(entry.get("shape"), name)
            chunk = self._chunk(entry, name, (0,) * len(shape), shape)
            self._building.tensor(path, _dtype(entry, name), shape, [chunk])
        else:
            raise FormatError(f"{name!r} is of the type {kind[:80]!r}, which is not read")

    def _add_shards(self, path: Path, parts: list[tuple[str, Entry]]) -> None:
        chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk] = {}
        dtypes: set[str] = set()
        for name, entry in parts:
            listed = entry.get(_SHARDED[entry["type"]])
            if not isinstance(listed, list):
                raise FormatError(f"{name!r} has no list of shards")
            for shard in listed:
                if not isinstance(shard, dict) or not isinstance(shard.get("tensor"), dict):
                    raise FormatError(f"{name!r} has a shard without a tensor")
                offsets, sizes = (_integers(shard.get(key), name) for key in ("offsets", "sizes"))
                tensor = shard["tensor"]
                if len(offsets) != len(sizes) or _integers(tensor.get("shape"), name) != sizes:
                    raise FormatError(f"a shard of {name!r} contradicts its tensor")
                dtypes.add(_dtype(tensor, name))
                if (offsets, sizes) not in chunks:
                    chunks[offsets, sizes] = self._chunk(tensor, name, offsets, sizes)
        if len(dtypes) != 1 or len({len(offsets) for offsets, _ in chunks}) != 1:
            raise FormatError(f"{parts[0][0]!r} has no shards, or shards that do not fit together")
        ends = [[at + n for at, n in zip(*box, strict=True)] for box in chunks]
        shape = tuple(max(column) for column in zip(*ends, strict=True))
        said = parts[0][1].get("shape")
        if said is not None and _integers(said, parts[0][0]) != shape:
            raise FormatError(f"{parts[0][0]!r} has the shape {said}, its chunks {list(shape)}")
        self._building.tensor(path, dtypes.pop(), shape, list(chunks.values()))

    def _chunk(
        self, entry: Entry, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> Chunk:
        file, begin, length = self._place(entry, name)
        serializer = entry.get("serializer")
        if serializer == "torch_save":
            return Chunk(file, begin, length, offsets, sizes, -1)
        nbytes = prod(sizes) * ITEM_SIZES[_dtype(entry, name)]
        if serializer != "buffer_protocol":
            raise FormatError(f"{name!r} is serialized by {str(serializer)[:80]}")
        if nbytes != length:
            raise FormatError(f"{name!r} has {nbytes} bytes, its place in a file {length}")
        return Chunk(file, begin, length, offsets, sizes)

    def _place(self, entry: Entry, name: str) -> tuple[int, int, int]:
        """File, first byte and bytes."""
        location, place = entry.get("location"), entry.get("byte_range")
        if not isinstance(location, str):
            raise FormatError(f"{name!r} has no location")
        file = self._building.file(location)
        size = self._building.size(file)
        if place is None:
            return file, 0, size
        ends = _integers(place, name)
        begin, end = ends if len(ends) == 2 else (1, 0)
        if not begin <= end <= size:
            raise FormatError(f"{name!r} lies at {place} of {location}, which has {size} bytes")
        self._taken.setdefault(file, []).append((begin, end, name))
        return file, begin, end - begin

    def _check_overlaps(self) -> None:
        for ranges in self._taken.values():
            last, other = 0, ""
            for begin, end, name in sorted(ranges):
                if begin < last and begin < end:
                    raise FormatError(f"{name!r} and {other!r} share bytes of a file")
                last, other = max(last, end), name

    def _path(self, name: str, is_shared: bool) -> Path:
        """Typed: which components are positions is said by the entries above."""
        parts = name.split("/")
        if len(parts) < 2 or not parts[0].isdecimal() or int(parts[0]) >= self._world_size:
            raise FormatError(f"{name[:200]!r} is not what an entry is called")
        path: list[Component] = []
        if not is_shared and self._world_size > 1:
            path.append(f"rank{int(parts[0])}")
        for depth, part in enumerate(parts[1:], 1):
            path.append(self._component("/".join(parts[:depth]), _decoded(part)))
        return tuple(path)

    def _component(self, above: str, part: str) -> Component:
        entry = self._entries.get(above)
        if entry is None:
            return part
        if entry["type"] == "list":
            if not part.isdecimal() or len(part) > 9:
                raise FormatError(f"{above!r} is a list, and has {part[:80]!r} in it")
            return Index(int(part))
        keys = entry.get("keys")
        numbers = {str(key): key for key in keys or () if type(key) is int}
        return numbers.get(part, part)


def _decoded(part: str) -> str:
    return part.replace("%2F", "/").replace("%25", "%")


def _position(name: str) -> int:
    last = name.rpartition("/")[2]
    if not last.isdecimal() or len(last) > 9:
        raise FormatError(f"{name[:200]!r} is not what an entry of a list is called")
    return int(last)


def _integers(values: object, name: str) -> tuple[int, ...]:
    if not isinstance(values, list) or any(
        type(value) is not int or not 0 <= value < _LIMIT for value in values
    ):
        raise FormatError(f"{name!r} has {str(values)[:80]} where sizes were expected")
    if len(values) > 64:
        raise FormatError(f"{name!r} has {len(values)} dimensions")
    return tuple(values)


def _dtype(entry: Entry, name: str) -> str:
    dtype = str(entry.get("dtype")).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise FormatError(f"{name!r} has the dtype {dtype[:80]!r}, which is not read")
    return dtype


def _unpacked(text: str) -> float:
    (value,) = struct.unpack("<d", base64.b64decode(text, validate=True))
    return float(value)


_PRIMITIVES: Final[Mapping[str, Any]] = {
    "int": int,
    "str": str,
    "bool": {"True": True, "False": False}.__getitem__,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": _unpacked,
}


def _primitive(entry: Entry, name: str) -> object:
    text = entry.get("serialized_value")
    if not isinstance(text, str):
        raise FormatError(f"{name!r} has no serialized_value")
    try:
        value: object = _PRIMITIVES[entry["type"]](text)
    except (ValueError, KeyError, struct.error, binascii.Error) as error:
        raise FormatError(f"{name!r} is no {entry['type']}: {text[:80]!r}") from error
    return value
