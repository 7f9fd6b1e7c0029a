"""Where the raw elements of each chunk lie; known from a manifest, looked up in plain DCP's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dcp_pipeline.core.errors import CorruptCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.formats.torch_zip import parse_tensor_zip
from dcp_pipeline.state.match import Match
from dcp_pipeline.storage.base import Source
from dcp_pipeline.types.dtypes import dtype_name

__all__ = ["locate_items"]


def locate_items(manifest: Manifest, match: Match, source: Callable[[int], Source]) -> ChunkTable:
    """The table of ``manifest`` with the payload of every row that ``match`` wants.

    Raises:
        CorruptCheckpointError: an item is not the tensor that the metadata says.
    """
    table = manifest.table
    keys = [t.key for t in match.tensors] + [v.key for v in match.values]
    rows = np.flatnonzero((table.payload < 0) & np.isin(table.key, keys))
    if not len(rows):
        return table
    payload = table.payload.copy()
    for row in rows:
        spec = table.keys[table.key[row]]
        payload[row] = 0 if spec.dtype is None else _payload(manifest, int(row), source)
    return replace(table, payload=payload)


def _payload(manifest: Manifest, row: int, source: Callable[[int], Source]) -> int:
    table = manifest.table
    name, spec = manifest.names[table.key[row]], table.keys[table.key[row]]
    file = source(int(table.file[row]))
    begin, length = int(table.offset[row]), int(table.length[row])

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        file.read_into(begin + offset, memoryview(data))
        return bytes(data)

    stored = parse_tensor_zip(read, length)
    sizes = table.boxes(row)[1]
    if dtype_name(stored.dtype) != spec.dtype or stored.sizes != sizes:
        raise CorruptCheckpointError(
            f"{file.name} holds {stored.dtype} {list(stored.sizes)} for {name!r}, .metadata says"
            f" {spec.dtype} {list(sizes)}"
        )
    expected, strides = 1, []
    for extent in reversed(sizes):
        strides.append(expected)
        expected *= extent
    is_plain = all(
        extent == 1 or stride == wanted
        for extent, stride, wanted in zip(sizes, stored.strides, reversed(strides), strict=True)
    )
    if not is_plain:
        raise CorruptCheckpointError(
            f"{name!r} is stored with strides {stored.strides}, which this reader does not take"
        )
    return int(stored.payload_offset + stored.storage_offset * spec.item_size)
