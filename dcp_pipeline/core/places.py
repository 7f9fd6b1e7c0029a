"""Whether the chunks of a manifest lie where the files have them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.quantized import check_quantized
from dcp_pipeline.core.spans import check_spans

if TYPE_CHECKING:
    from dcp_pipeline.core.manifest import Manifest

__all__ = ["check_places"]


def check_places(manifest: Manifest) -> None:
    """Raise unless every chunk lies in a file that is there and long enough.

    Raises:
        FormatError: otherwise.
    """
    table, files = manifest.table, manifest.files
    if len({entry.name for entry in files}) != len(files):
        raise FormatError("a data file is listed twice")
    for name, spec in zip(manifest.names, table.keys, strict=True):
        if math.prod(extent or 1 for extent in spec.shape) * spec.item_size >= 1 << 62:
            raise FormatError(f"{name!r} has the absurd shape {list(spec.shape)}")
    _check_inline(manifest)
    if not len(table):
        if manifest.encoded or manifest.strided:
            raise FormatError("encoded rows of an empty table")
        _check_quantized(manifest)
        return
    if table.file.min() < 0 or table.file.max() >= len(files):
        raise FormatError("a chunk lies in a file that is not listed")
    widths = np.asarray([len(spec.shape) for spec in table.keys], np.int64)[table.key]
    if widths.max() > table.dimensions:
        raise FormatError("a chunk has fewer dimensions than its tensor")
    if np.asarray([spec.alias >= 0 for spec in table.keys])[table.key].any():
        raise FormatError("a key that shares another's storage has chunks of its own")
    places = (table.offset, table.length, table.offsets, table.sizes)
    if min(column.min(initial=0) for column in places) < 0:
        raise FormatError("a chunk has a negative place or size")
    if max(column.max(initial=0) for column in (*places, table.payload)) >= 1 << 62:
        raise FormatError("a chunk has an absurd place or size")
    if not manifest.is_foreign and table.payload.min() < 0:
        raise FormatError("it is not said where the elements of a chunk start")
    ends = table.offset + table.length
    sizes = np.asarray([entry.size for entry in files], np.int64)[table.file]
    if (ends > sizes).any():
        row = int(np.argmax(ends > sizes))
        raise FormatError(
            f"a chunk of {manifest.names[table.key[row]]!r} ends at {ends[row]}, its file"
            f" {files[table.file[row]].name} has {sizes[row]} bytes"
        )
    volume = table.sizes.prod(axis=1, dtype=float) * table.item_sizes
    is_tensor = np.asarray([spec.dtype is not None for spec in table.keys])[table.key]
    is_tensor[_check_encoded(manifest)] = False
    is_tensor[_check_quantized(manifest)] = False
    is_tensor[_check_strided(manifest)] = False
    # Where the payload is not known yet, nothing but the elements may be left out of the item.
    if (is_tensor & (np.maximum(table.payload, 0) + volume > table.length)).any():
        raise FormatError("a chunk's elements do not fit into its item")
    if (table.payload > table.length).any():
        raise FormatError("the elements of a chunk start behind its item")


def _check_encoded(manifest: Manifest) -> list[int]:
    """The rows that are encoded, each as it has to be."""
    table = manifest.table
    for row, spans in manifest.encoded.items():
        if not 0 <= row < len(table) or table.keys[table.key[row]].dtype is None:
            raise FormatError(f"row {row} is encoded, but no chunk of a tensor")
        nbytes = math.prod(table.boxes(row)[1]) * table.keys[table.key[row]].item_size
        size = manifest.files[table.file[row]].size
        check_spans(spans, nbytes, size, manifest.names[table.key[row]])
    return list(manifest.encoded)


def _check_quantized(manifest: Manifest) -> list[int]:
    """The rows that are codes, each as it has to be."""
    table = manifest.table
    if not manifest.quantized:
        return []
    sizes = [entry.size for entry in manifest.files]
    check_quantized(manifest.quantized, manifest.names, table, sizes)
    rows: list[int] = np.flatnonzero(np.isin(table.key, list(manifest.quantized))).tolist()
    if not manifest.encoded.keys().isdisjoint(rows):
        raise FormatError("codes that are encoded once more")
    return rows


def _check_inline(manifest: Manifest) -> None:
    """Values without rows belong to foreign checkpoints alone."""
    keys = manifest.table.keys
    for key in manifest.inline:
        if not manifest.is_foreign or key >= len(keys) or keys[key].dtype is not None:
            raise FormatError(f"key {key} is no value that a manifest may hold itself")
    if np.isin(manifest.table.key, list(manifest.inline)).any():
        raise FormatError("a value lies in the manifest and in a file")


def _check_strided(manifest: Manifest) -> list[int]:
    """The rows with strides of their own, whose elements all lie in their items."""
    table = manifest.table
    for row, strides in manifest.strided.items():
        if not manifest.is_foreign or row >= len(table) or row in manifest.encoded:
            raise FormatError(f"row {row} cannot have strides of its own")
        spec, sizes = table.keys[table.key[row]], table.boxes(row)[1]
        if spec.dtype is None or len(strides) != len(sizes):
            raise FormatError(f"row {row} has {len(strides)} strides, its tensor another number")
        pairs = zip(sizes, strides, strict=True)
        last = sum((extent - 1) * step for extent, step in pairs if extent)
        if (last + 1) * spec.item_size > table.length[row] - max(int(table.payload[row]), 0):
            raise FormatError(f"the elements of {manifest.names[table.key[row]]!r} leave its item")
    return list(manifest.strided)
