"""A Hugging Face model repository as a manifest: what its files hold, checked against each other.

Errors: a file that is lacking or damaged; tensors that overlap, leave holes or lie beyond the end
of their file; a key that the index names and its file lacks, or that lies in another file than the
index says; a key in two files; chunks that do not tile their tensor. Warnings only, since real
repositories have them: a ``total_size`` that is not the sum of the tensors' bytes, and a key that
the index does not name, in one of its files.

Shards that DCP wrote do not say how large the whole tensor is: it ends with the last chunk there
is. Where the files of the last rank are lacking, a load finds it by the shape of the template.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    FormatError,
    MissingFileError,
    UnsafeCheckpointError,
    list_some,
)
from dcp_pipeline.core.fingerprint import Fingerprint, make_fingerprint
from dcp_pipeline.core.manifest import FileEntry, Manifest
from dcp_pipeline.core.path import check_paths
from dcp_pipeline.core.places import check_places
from dcp_pipeline.core.quantized import Quantized
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.bounded_json import parse_object
from dcp_pipeline.formats.safetensors import (
    SafetensorsHeader,
    parse_header,
    torch_dtype_and_shape,
)
from dcp_pipeline.formats.torch_zip import StoredTensor, parse_state_zip
from dcp_pipeline.layout.huggingface_index import ModelFiles, find_files
from dcp_pipeline.layout.huggingface_writing import FINGERPRINTS, SAVE_ID
from dcp_pipeline.storage.base import Directory, Source
from dcp_pipeline.types.dtypes import dtype_name

__all__ = ["Repository", "StoredChunk", "manifest_of", "read_repository"]

logger = logging.getLogger("dcp_pipeline")

_SHARDING_INFO = "DCP_SHARDING_INFO"
_MOST_INFO_BYTES = 100_000_000
_SAVE = re.compile(r"[0-9a-f]{32}")
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A tensor of a file, or a part of one.

    Attributes:
        dtype: name of the element type.
        offsets, sizes: its place in the whole tensor.
        file: number of the file.
        begin, length: where its bytes lie.
        payload: where its elements start from there; -1 where they are not in row-major order.
        same_as: the key whose very elements these are too.
    """

    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    begin: int
    length: int
    payload: int = 0
    same_as: str | None = None


@dataclass
class Repository:
    """What the files of a model hold.

    Attributes:
        files: their names and sizes.
        chunks: of each key.
        ties: keys that are another one by a second name, which the files do not hold again.
        fingerprints: of tensors, 16 hexadecimal digits each, where a save of ours has left them.
        save_ids: of the saves of ours that have written the files; ``None`` for others.
    """

    files: list[FileEntry] = field(default_factory=list)
    chunks: dict[str, list[StoredChunk]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    save_ids: set[str | None] = field(default_factory=set)

    def shape(self, key: str) -> tuple[int, ...]:
        """Sizes of the whole tensor.

        Raises:
            UnsafeCheckpointError: they are absurd.
        """
        boxes = [zip(one.offsets, one.sizes, strict=True) for one in self.chunks[key]]
        ends = [[at + extent for at, extent in box] for box in boxes]
        shape = tuple(map(max, *ends)) if len(ends) > 1 else tuple(ends[0])
        if max(shape, default=0) >= 1 << 62:
            raise UnsafeCheckpointError(f"{key!r} claims the sizes {list(shape)}")
        return shape


def read_repository(directory: Directory, files: ModelFiles | None = None) -> Repository:
    """Look into the headers of all files of the model.

    Args:
        files: of it; ``None`` for all that make the model of the directory.

    Raises:
        CheckpointNotFoundError: there is no model.
        CorruptCheckpointError, UnsafeCheckpointError: see the module.
    """
    files = files or find_files(directory)
    found = Repository()
    for name in files.names:
        _read_file(directory, name, found, files)
    if files.weight_map is not None:
        _check_index(files, found)
    for key, chunks in found.chunks.items():
        _check_chunks(key, chunks, found.files)
    return found


def _read_file(directory: Directory, name: str, found: Repository, model: ModelFiles) -> None:
    try:
        source = directory.open(name)
    except MissingFileError:
        if model.index is None or model.weight_map is None:
            raise
        keys = [key for key, file in model.weight_map.items() if file == name]
        raise MissingFileError(
            f"{name} is not in {directory.location}; {model.index} places {len(keys)} tensors in"
            f" it: {list_some(keys, 3)}",
            name,
        ) from None
    number = len(found.files)
    with source, _naming(name):
        found.files.append(FileEntry(name, source.size))
        stored = (
            _safetensors(source, number, found)
            if name.endswith(".safetensors")
            else _torch_zip(source, number)
        )
        for key, chunk in stored:
            expected = None if model.weight_map is None else model.weight_map.get(key, name)
            if expected not in (None, name):
                raise FormatError(f"it holds {key!r}, which {model.index} places in {expected!r}")
            found.chunks.setdefault(key, []).append(chunk)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Put the file's name before what is wrong with it."""
    try:
        yield
    except (FormatError, UnsafeCheckpointError) as error:
        raise type(error)(f"{name}: {error.message}") from error


def _reader(source: Source) -> Any:
    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        source.read_into(offset, memoryview(data))
        return bytes(data)

    return read


def _safetensors(
    source: Source, number: int, found: Repository
) -> Iterator[tuple[str, StoredChunk]]:
    header = parse_header(_reader(source), source.size)
    _note_metadata(header, found)
    info = header.metadata.get(_SHARDING_INFO)
    places = None
    if info:
        data = info.encode("utf-8")
        places = parse_object(data, _SHARDING_INFO, most_bytes=_MOST_INFO_BYTES)
    for entry in header.entries:
        dtype, sizes = torch_dtype_and_shape(entry.code, entry.shape)
        offsets = (0,) * len(sizes)
        if places is not None:
            offsets = _saved_offsets(places.get(entry.name), entry.name, len(sizes))
        length = entry.end - entry.begin
        yield entry.name, StoredChunk(dtype, offsets, sizes, number, entry.begin, length)


def _note_metadata(header: SafetensorsHeader, found: Repository) -> None:
    """What a save of ours, or ``safetensors.torch.save_model``, has said of the tensors."""
    keys = [entry.name for entry in header.entries]
    inside = set(keys)
    for name, text in header.metadata.items():
        if text in inside and name not in inside and name != "format":
            found.ties[name] = text
    save_id = header.metadata.get(SAVE_ID, "")
    found.save_ids.add(save_id if _SAVE.fullmatch(save_id) else None)
    words = header.metadata.get(FINGERPRINTS, "")
    if len(words) == 16 * len(keys) and not set(words) - set("0123456789abcdef"):
        parts = (words[start : start + 16] for start in range(0, len(words), 16))
        found.fingerprints |= dict(zip(keys, parts, strict=True))


def _saved_offsets(place: object, key: str, dimensions: int) -> tuple[int, ...]:
    offsets = place.get("saved_offsets") if isinstance(place, dict) else None
    if (
        not isinstance(offsets, list)
        or len(offsets) != dimensions
        or any(type(at) is not int or not 0 <= at < 1 << 62 for at in offsets)
    ):
        raise FormatError(f"{_SHARDING_INFO} does not say where {key!r} lies in its tensor")
    return tuple(offsets)


def _torch_zip(source: Source, number: int) -> Iterator[tuple[str, StoredChunk]]:
    read = _reader(source)
    if read(0, min(len(_OLD_TORCH), source.size)) == _OLD_TORCH:
        raise FormatError(
            "it is of the format that torch.save wrote before 1.6, which is one pickle; load it"
            " with torch.load(weights_only=True) and save it again"
        )
    first: dict[tuple[object, ...], str] = {}
    for key, stored in parse_state_zip(read, source.size).items():
        dtype = dtype_name(stored.dtype)
        if dtype is None:
            raise FormatError(f"{key!r} has dtype {stored.dtype}")
        place = (
            stored.payload_offset, stored.storage_offset, stored.sizes, stored.strides, dtype
        )  # fmt: skip
        same_as = first.setdefault(place, key)
        chunk = _stored_in_zip(stored, dtype, number, source.size)
        yield key, replace(chunk, same_as=None if same_as == key else same_as)


def _stored_in_zip(stored: StoredTensor, dtype: str, number: int, size: int) -> StoredChunk:
    offsets = (0,) * len(stored.sizes)
    if not stored.is_row_major:
        # Strides are looked up once more by whoever reads it.
        return StoredChunk(dtype, offsets, stored.sizes, number, 0, size, -1)
    begin = stored.payload_offset + stored.storage_offset * ITEM_SIZES[dtype]
    length = prod(stored.sizes) * ITEM_SIZES[dtype]
    return StoredChunk(dtype, offsets, stored.sizes, number, begin, length)


def _check_index(model: ModelFiles, found: Repository) -> None:
    """What lies elsewhere than the index says was refused file by file already."""
    assert model.weight_map is not None
    lacking = [key for key in model.weight_map if key not in found.chunks]
    if lacking:
        raise FormatError(
            f"{model.index} names {len(lacking)} tensors that their files lack:"
            f" {list_some([f'{key} ({model.weight_map[key]})' for key in lacking], 5)}"
        )
    extra = [key for key in found.chunks if key not in model.weight_map]
    if extra:
        logger.warning("%s does not name %s, which its files hold", model.index, list_some(extra))
    nbytes = sum(
        prod(one.sizes) * ITEM_SIZES[one.dtype] for row in found.chunks.values() for one in row
    )
    if model.total_size not in (None, nbytes):
        logger.warning(
            "%s says that all tensors have %s bytes, they have %s",
            model.index, model.total_size, nbytes,
        )  # fmt: skip


def _check_chunks(key: str, chunks: list[StoredChunk], files: list[FileEntry]) -> None:
    if len(chunks) == 1:
        return
    seen: dict[tuple[int, ...], StoredChunk] = {}
    for one in chunks:
        other = seen.setdefault(one.offsets, one)
        names = f"{files[other.file].name} and {files[one.file].name}"
        if other is not one:
            raise FormatError(f"{key!r} at {list(one.offsets)} is both in {names}")
        first = chunks[0]
        if (first.dtype, len(first.sizes)) != (one.dtype, len(one.sizes)):
            raise FormatError(
                f"{key!r} is {first.dtype} {list(first.sizes)} in {files[first.file].name},"
                f" {one.dtype} {list(one.sizes)} in {files[one.file].name}"
            )


def manifest_of(
    found: Repository, location: str, quantized: Mapping[str, Quantized] | None = None
) -> Manifest:
    """What the files hold, as a manifest without digests.

    Args:
        quantized: how the elements of keys come from codes and scales.

    Raises:
        CorruptCheckpointError: the chunks of a tensor do not tile it.
        FormatError, UnsafeCheckpointError: absurd shapes or places.
    """
    names = list(found.chunks)
    numbers = {name: number for number, name in enumerate(names)}
    specs = []
    for name, chunks in found.chunks.items():
        same_as = chunks[0].same_as if len(chunks) == 1 else None
        alias = -1 if same_as is None else numbers[same_as]
        specs.append(KeySpec((name,), Kind.TENSOR, chunks[0].dtype, found.shape(name), alias))
    for name, other in found.ties.items():
        if name not in numbers and specs[numbers[other]].alias < 0:
            names.append(name)
            specs.append(replace(specs[numbers[other]], path=(name,), alias=numbers[other]))
    check_paths([spec.path for spec in specs])
    rows = [
        (key, one)
        for key, (spec, name) in enumerate(zip(specs, names, strict=True))
        for one in found.chunks.get(name, ())
        if 0 not in one.sizes and spec.alias < 0
    ]
    table = ChunkTable.build(
        specs, [key for key, _ in rows], [one.offsets for _, one in rows],
        [one.sizes for _, one in rows],
    )  # fmt: skip
    places = np.asarray(
        [(one.file, one.begin, one.length, one.payload) for _, one in rows], np.int64
    ).reshape(-1, 4)
    file, offset, length, payload = places.T
    table = replace(table, file=file, offset=offset, length=length, payload=payload)
    is_safe = all(entry.name.endswith(".safetensors") for entry in found.files)
    manifest = Manifest(
        save_id=_save_id(found),
        created=0.0,
        world_size=0,
        serialization="safetensors" if is_safe else "torch_save",
        layout="huggingface",
        names=tuple(names),
        table=table.sort(),
        files=tuple(found.files),
        fingerprint=None if quantized else _fingerprint(found, names, specs),
        quantized={numbers[name]: one for name, one in (quantized or {}).items()},
    )
    check_places(manifest)
    problems = tiling_problems(
        manifest.table, np.asarray([spec.alias >= 0 for spec in specs], bool)
    )
    if problems:
        raise CorruptCheckpointError(
            f"the files in {location} do not hold whole tensors: {'; '.join(problems)}"
        )
    return manifest


def _save_id(found: Repository) -> str:
    """Of the one save that has written all files; nothing where there is no such save."""
    (save_id, *others) = found.save_ids or {None}
    return "" if others or save_id is None else save_id


def _fingerprint(found: Repository, names: list[str], specs: list[KeySpec]) -> Fingerprint | None:
    kept = [
        names[spec.alias] if spec.alias >= 0 else name
        for name, spec in zip(names, specs, strict=True)
    ]
    if not all(name in found.fingerprints for name in kept):
        return None
    return make_fingerprint(names, specs, [int(found.fingerprints[name], 16) for name in kept])
