"""A MEGA repository, ours or anybody's, as a manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IncompleteCheckpointError,
    NewerFormatError,
    list_some,
)
from dcp_pipeline.core.fingerprint import Fingerprint, decode_fingerprint
from dcp_pipeline.core.manifest import FileEntry, Manifest, check_places, decode_keys
from dcp_pipeline.core.path import Path, check_paths, decode_path
from dcp_pipeline.core.spans import Span
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.bounded_json import parse_object
from dcp_pipeline.formats.mega import KeyValue, MegaFile, parse_mega
from dcp_pipeline.formats.mega_keys import (
    BOXES_KEY,
    FORMAT,
    FORMAT_KEY,
    STATE_KEY,
    is_value,
    key_of_value,
)
from dcp_pipeline.formats.mega_tensors import MegaTensor
from dcp_pipeline.layout.export import is_export_part
from dcp_pipeline.layout.mega_index import MAX_INDEX_BYTES, MegaIndex, parse_index
from dcp_pipeline.layout.mega_names import INDEX, SINGLE, whole_files
from dcp_pipeline.storage.base import Directory, file_reader

__all__ = ["find_files", "mega_manifest", "saved_by"]

_MOST_JSON = 256 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a tensor, or a value where ``tensor`` is ``None``."""

    file: int
    offsets: tuple[int, ...]
    tensor: MegaTensor | None = None
    value: KeyValue | None = None


@dataclass
class _Key:
    dtype: str | None
    shape: tuple[int, ...]
    pieces: dict[tuple[int, ...], _Piece] = field(default_factory=dict)


def find_files(directory: Directory) -> tuple[list[str], MegaIndex | None]:
    """The files of a repository, and its index if it has one.

    ``model.mega`` is believed before an index beside it.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptCheckpointError: the index is damaged, or shards are missing.
        UnsafeCheckpointError: the index leads out of the directory.
    """
    found = directory.names()
    if SINGLE in found:
        return [SINGLE], None
    indices = [name for name in found if name.endswith(".mega.index.json")]
    name = INDEX if INDEX in indices or len(indices) != 1 else indices[0]
    if name in indices:
        index = parse_index(directory.read(name, 0, MAX_INDEX_BYTES + 1), name)
        return list(index.files), index
    if indices:
        raise FormatError(f"{directory.location} has several indices: {list_some(indices, 5)}")
    if any(map(is_export_part, found)):
        raise IncompleteCheckpointError(
            f"the checkpoint in {directory.location} is incomplete: a save into it was begun, and"
            " never committed",
            directory.location,
        )
    files = whole_files(found, directory.location)
    if not files:
        what = "no MEGA file in it" if found else "nothing there"
        raise CheckpointNotFoundError(f"{directory.location}: {what}", directory.location)
    return files, None


def mega_manifest(directory: Directory, verify: bool = True, only: str | None = None) -> Manifest:
    """What a repository holds; key/values that are not the format's own are values.

    Args:
        verify: keep the checksums of the format, which a read then compares.
        only: the one file to read; ``None`` for all that make the repository.

    Raises:
        CheckpointNotFoundError: there is none.
        CorruptCheckpointError: files are missing or damaged, or contradict each other.
        UnsafeCheckpointError: names lead out of the directory, or sizes are absurd.
    """
    names, index = find_files(directory) if only is None else ([only], None)
    files, entries = _parsed(directory, names)
    if index is None and len(files) > 1 and any(FORMAT_KEY in file.metadata for file in files):
        raise IncompleteCheckpointError(
            f"the checkpoint in {directory.location} is incomplete: its shards are there, but not"
            f" {INDEX}, which a save puts in place last of all",
            directory.location,
        )
    for name, file in zip(names, files, strict=True):
        _check_format(name, file)
    if index is not None and index.weight_map is not None:
        _check_map(index.weight_map, names, files)
    keys, values = _tensors(names, files), _values(files)
    stored = _stored_state(index, names, files)
    ordered, specs, empty = _specs(keys, values, stored)
    table, encoded = _table(keys, ordered, specs, verify)
    prints = _fingerprint(stored, ordered, specs)
    signed = [name for name, file in zip(names, files, strict=True) if file.is_signed]
    if signed:
        logger.warning("signatures are not verified: %s", list_some(signed, 5))
    manifest = Manifest(
        save_id="",
        created=0.0,
        world_size=0,
        serialization="mega",
        layout="mega",
        names=ordered,
        table=table,
        files=tuple(entries),
        empty=empty,
        notes={"mega": {"signatures_not_verified": signed}} if signed else {},
        fingerprint=prints,
        encoded=encoded,
    )
    check_places(manifest)
    problems = tiling_problems(table, np.asarray([spec.alias >= 0 for spec in specs], bool))
    if problems:
        raise FormatError(f"{directory.location} is damaged: {'; '.join(problems)}")
    return manifest


def saved_by(directory: Directory) -> str | None:
    """The id of the save of this package that has written a repository, if it says so.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    names, index = find_files(directory)
    names = names if index is None else []
    files, _ = _parsed(directory, names)
    stored = _stored_state(index, names, files)
    save_id = stored.get("save_id") if stored is not None else None
    return save_id if isinstance(save_id, str) else None


def _parsed(directory: Directory, names: list[str]) -> tuple[list[MegaFile], list[FileEntry]]:
    files, entries = [], []
    for name in names:
        with directory.open(name) as source:
            try:
                files.append(parse_mega(file_reader(source), source.size))
            except CheckpointError as error:
                raise type(error)(f"{name}: {error}") from error
            entries.append(FileEntry(name, source.size))
    return files, entries


def _check_format(name: str, file: MegaFile) -> None:
    found = file.metadata.get(FORMAT_KEY)
    if found is not None and (type(found.value) is not int or found.value > FORMAT):
        raise NewerFormatError(
            f"{name} is of format {str(found.value)[:40]} of this package, which reads up to"
            f" {FORMAT}: install a newer dcp-pipeline"
        )


def _check_map(weight_map: Mapping[str, str], names: list[str], files: list[MegaFile]) -> None:
    """Raise unless every tensor lies where the index says, and nowhere else."""
    found: dict[str, str] = {}
    for name, file in zip(names, files, strict=True):
        for tensor in file.tensors:
            if tensor.name in found:
                raise FormatError(
                    f"{tensor.name[:80]!r} lies in {found[tensor.name]} and in {name}"
                )
            found[tensor.name] = name
    for tensor_name in sorted(set(weight_map) ^ set(found)):
        where = found.get(tensor_name)
        what = f"lies in {where}" if where else f"is not in {weight_map[tensor_name]}"
        said = weight_map.get(tensor_name)
        raise FormatError(
            f"{tensor_name[:80]!r} {what}, the index"
            f" {f'places it in {said}' if said else 'does not know it'}"
        )
    for tensor_name, said in weight_map.items():
        if found[tensor_name] != said:
            raise FormatError(
                f"{tensor_name[:80]!r} lies in {found[tensor_name]}, the index places it in {said}"
            )


def _tensors(names: list[str], files: list[MegaFile]) -> dict[str, _Key]:
    """All tensors with their pieces."""
    keys: dict[str, _Key] = {}
    for number, (name, file) in enumerate(zip(names, files, strict=True)):
        boxes = _json(file, BOXES_KEY, name)
        for tensor in file.tensors:
            key, offsets, shape = _box(boxes.get(tensor.name), tensor, name)
            found = keys.setdefault(key, _Key(tensor.dtype, shape))
            if (found.dtype, found.shape) != (tensor.dtype, shape):
                raise FormatError(
                    f"{key[:80]!r} is {tensor.dtype} {list(shape)} in {name}, {found.dtype}"
                    f" {list(found.shape)} in another file"
                )
            if offsets in found.pieces:
                raise FormatError(f"{key[:80]!r} lies in two files, one of them {name}")
            found.pieces[offsets] = _Piece(number, offsets, tensor)
    return keys


def _values(files: list[MegaFile]) -> dict[str, _Key]:
    """Key/values that are not the format's own. Shards repeat them; the first is taken."""
    values: dict[str, _Key] = {}
    for number, file in enumerate(files):
        for key, pair in file.metadata.items():
            if is_value(key):
                piece = _Piece(number, (), value=pair)
                values.setdefault(key_of_value(key), _Key(None, (), {(): piece}))
    return values


def _json(file: MegaFile, key: str, name: str) -> dict[str, Any]:
    found = file.metadata.get(key)
    if found is None:
        return {}
    if not isinstance(found.value, str):
        raise FormatError(f"{name}: {key} is no text")
    what = f"{key} of {name}"
    return parse_object(found.value.encode(), what, most_bytes=_MOST_JSON, most_values=1 << 23)


def _box(box: Any, tensor: MegaTensor, file: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Key, offsets and the whole's sizes of a stored tensor."""
    if box is None:
        return tensor.name, (0,) * len(tensor.shape), tensor.shape
    try:
        key, offsets, shape = box
        numbers = [*offsets, *shape]
    except (TypeError, ValueError):
        key, numbers = None, []
    width = len(tensor.shape)
    if (
        not isinstance(key, str)
        or any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers)
        or not len(offsets) == len(shape) == width
    ):
        raise FormatError(f"{file}: the box of {tensor.name[:80]!r} is {str(box)[:80]}")
    return key, tuple(offsets), tuple(shape)


def _stored_state(
    index: MegaIndex | None, names: list[str], files: list[MegaFile]
) -> dict[str, Any] | None:
    """What this package has noted of the state, if it has written the repository."""
    if index is not None and isinstance(index.metadata.get(STATE_KEY), dict):
        found: dict[str, Any] = index.metadata[STATE_KEY]
        return found
    for name, file in zip(names, files, strict=True):
        if STATE_KEY in file.metadata:
            return _json(file, STATE_KEY, name)
    return None


def _specs(
    keys: dict[str, _Key], values: dict[str, _Key], stored: dict[str, Any] | None
) -> tuple[tuple[str, ...], tuple[KeySpec, ...], tuple[Any, ...]]:
    """Names, keys and empty containers; to ``keys`` is added what is no tensor.

    What nobody has noted lies at the top if it is a tensor, and else in a section of its own, so
    that a state without such values can be loaded.
    """
    names, specs, empty = ((), (), ()) if stored is None else _noted(stored)
    own = {name: spec for name, spec in zip(names, specs, strict=True) if spec.alias < 0}
    for name, spec in own.items():
        if name in values and spec.dtype is None:
            keys[name] = values.pop(name)
        elif name not in keys and 0 in spec.shape:
            keys[name] = _Key(spec.dtype, spec.shape)
        key = keys.get(name)
        if key is None or (key.dtype, key.shape) != (spec.dtype, spec.shape):
            found = f"{key.dtype} {list(key.shape)}" if key is not None else "not there"
            noted = f"{spec.dtype} {list(spec.shape)}" if spec.dtype else "a value"
            raise FormatError(f"{name[:80]!r} is {found}, in {STATE_KEY} it is {noted}")
    added = {name: KeySpec((name,), Kind.TENSOR, key.dtype, key.shape)
             for name, key in keys.items() if name not in own}  # fmt: skip
    section = "metadata"
    while any(name == section or name.startswith(f"{section}.") for name in (*names, *keys)):
        section += "_"
    for name, key in values.items():
        keys[f"{section}.{name}"] = key
        added[f"{section}.{name}"] = KeySpec((section, name), Kind.VALUE)
    if not added.keys().isdisjoint(names):
        raise FormatError(f"{min(added.keys() & set(names))[:80]!r} is a tensor and another key")
    return (*names, *added), (*specs, *added.values()), empty


def _fingerprint(
    stored: dict[str, Any] | None, names: tuple[str, ...], specs: tuple[KeySpec, ...]
) -> Fingerprint | None:
    try:
        found = decode_fingerprint((stored or {}).get("fingerprint"), names, specs)
    except CheckpointError:
        raise
    except Exception as error:  # as above
        raise FormatError(f"{STATE_KEY} is damaged: {type(error).__name__} {error}") from error
    return found


def _noted(
    stored: dict[str, Any],
) -> tuple[tuple[str, ...], tuple[KeySpec, ...], tuple[tuple[Path, str], ...]]:
    """Names, keys and empty containers as this package has noted them."""
    try:
        names, specs = decode_keys(stored["keys"])
        empty = tuple((decode_path(path), str(kind)) for path, kind in stored["empty"])
    except CheckpointError:
        raise
    except Exception as error:  # whatever members of other types make the reader trip over
        raise FormatError(f"{STATE_KEY} is damaged: {type(error).__name__} {error}") from error
    strange = {kind for _, kind in empty} - {"dict", "list", "tuple"}
    if strange:
        raise FormatError(f"{STATE_KEY} has empty containers of the kinds {sorted(strange)}")
    return names, specs, empty


def _table(
    keys: dict[str, _Key],
    names: tuple[str, ...],
    specs: tuple[KeySpec, ...],
    verify: bool,
) -> tuple[ChunkTable, dict[int, tuple[Span, ...]]]:
    """The rows of all pieces with elements in them, in the order of a manifest."""
    check_paths([spec.path for spec in specs])
    rows: list[int] = []
    boxes, places = [], []
    encoded: dict[int, tuple[Span, ...]] = {}
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        if spec.alias >= 0:
            continue
        for offsets, piece in sorted(keys[name].pieces.items()):
            if piece.value is not None:
                place = (piece.file, piece.value.offset, piece.value.nbytes)
                sizes: tuple[int, ...] = ()
            else:
                assert piece.tensor is not None
                if not piece.tensor.nbytes:
                    continue
                sizes, spans = piece.tensor.shape, _kept(piece.tensor.spans, verify)
                if spans is not None:
                    encoded[len(rows)] = spans
                begin = min(span.offset for span in piece.tensor.spans)
                end = max(span.offset + span.stored for span in piece.tensor.spans)
                place = (piece.file, begin, end - begin)
            rows.append(number)
            boxes.append((offsets, sizes))
            places.append(place)
    table = ChunkTable.build(specs, rows, [box[0] for box in boxes], [box[1] for box in boxes])
    columns = np.asarray(places, np.int64).reshape(-1, 3)
    table = replace(
        table,
        file=columns[:, 0].copy(),
        offset=columns[:, 1].copy(),
        length=columns[:, 2].copy(),
        payload=np.zeros(len(rows), np.int64),
    )
    return table, encoded


def _kept(spans: tuple[Span, ...], verify: bool) -> tuple[Span, ...] | None:
    """The spans that a read has to go by; ``None`` where the elements simply lie in the file."""
    if not verify:
        spans = tuple(replace(span, checksum="", digest=b"") for span in spans)
    if len(spans) == 1 and spans[0].is_plain and not spans[0].checksum:
        return None
    return spans
