"""Where the elements of each chunk lie; a manifest says so, plain DCP's files are looked into."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from dcp_pipeline.core.errors import CorruptCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.quantized import QuantizedKeys
from dcp_pipeline.core.spans import SpansByRow
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.formats.torch_zip import StoredTensor, parse_state_zip, parse_tensor_zip
from dcp_pipeline.state.match import Match
from dcp_pipeline.storage.base import Source
from dcp_pipeline.types.dtypes import DTYPES, dtype_name

__all__ = ["Located", "locate_items", "locate_rows"]


@dataclass(frozen=True)
class Located:
    """The chunks of a checkpoint with every payload that is wanted.

    Attributes:
        table: of the manifest, payloads filled in.
        strided: rows whose elements are not stored in row-major order, and how they are.
        encoded: rows whose bytes are not simply their elements.
        quantized: keys that are stored as codes and scales.
        files, names: of the data files, and of the keys.
    """

    table: ChunkTable
    strided: dict[int, StoredTensor]
    encoded: SpansByRow
    quantized: QuantizedKeys
    files: tuple[str, ...]
    names: tuple[str, ...]


def locate_items(manifest: Manifest, match: Match, source: Callable[[int], Source]) -> Located:
    """Find the payload of every row that ``match`` wants; see :func:`locate_rows`."""
    table = manifest.table
    mapped = {name for t in match.tensors if t.mapped is not None for name in t.mapped.sources}
    keys = [t.key for t in match.tensors if t.mapped is None] + [v.key for v in match.values]
    keys += [key for key, name in enumerate(manifest.names) if name in mapped]
    return locate_rows(manifest, np.flatnonzero(np.isin(table.key, keys)).tolist(), source)


def locate_rows(
    manifest: Manifest, rows: Iterable[int], source: Callable[[int], Source]
) -> Located:
    """Find the payload of ``rows``.

    Raises:
        CorruptCheckpointError: an item is not the tensor that the metadata says.
    """
    table = manifest.table
    payload = table.payload.copy()
    strided: dict[int, StoredTensor] = {}
    states: dict[int, dict[str, StoredTensor]] = {}
    for row in rows:
        if row in manifest.strided:
            strided[row] = _strided(manifest, row)
            continue
        if payload[row] >= 0 or row in strided:
            continue
        if table.keys[table.key[row]].dtype is None:
            payload[row] = 0
            continue
        stored = _parse(manifest, row, source, states)
        payload[row] = stored.payload_offset
        if stored.is_contiguous:
            payload[row] += stored.storage_offset * stored.dtype.itemsize
        else:
            strided[row] = stored
    files = tuple(entry.name for entry in manifest.files)
    located = replace(table, payload=payload)
    return Located(located, strided, manifest.encoded, manifest.quantized, files, manifest.names)


def _strided(manifest: Manifest, row: int) -> StoredTensor:
    """A row whose strides the manifest knows."""
    table = manifest.table
    dtype = table.keys[table.key[row]].dtype
    assert dtype is not None
    nbytes = int(table.length[row])
    sizes, strides = table.boxes(row)[1], manifest.strided[row]
    return StoredTensor(DTYPES[dtype], sizes, strides, 0, 0, nbytes, None)


def _parse(
    manifest: Manifest,
    row: int,
    source: Callable[[int], Source],
    states: dict[int, dict[str, StoredTensor]],
) -> StoredTensor:
    """Look into the item of a row, or into the whole file where that is one state dict."""
    table = manifest.table
    spec, name = table.keys[table.key[row]], manifest.names[table.key[row]]
    number = int(table.file[row])
    file = source(number)
    begin = int(table.offset[row])

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        file.read_into(begin + offset, memoryview(data))
        return bytes(data)

    if manifest.layout == "huggingface":
        if number not in states:
            states[number] = parse_state_zip(read, int(table.length[row]))
        stored = states[number].get(name)
        if stored is None:
            raise CorruptCheckpointError(f"{file.name} does not hold {name!r} any more")
    else:
        stored = parse_tensor_zip(read, int(table.length[row]))
    sizes = table.boxes(row)[1]
    if dtype_name(stored.dtype) != spec.dtype or stored.sizes != sizes:
        raise CorruptCheckpointError(
            f"{file.name} holds {stored.dtype} {list(stored.sizes)} for {name!r}, .metadata says"
            f" {spec.dtype} {list(sizes)}"
        )
    return stored
