"""Integer columns as few bytes: delta along the rows, narrowest width, bytes shuffled, deflated.

This is how chunk tables travel between ranks and lie in a manifest. Rows of a checkpoint are
regular (the next key, the same size, the next offset), so differences are small and repeat:
two million chunks of 2,048 ranks take a few megabytes. Nothing in it is executable.

A packed set of columns is ``u32 length`` + JSON header + the deflated columns one after another.
The header lists ``[name, shape, width, bytes]`` per column.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping

import numpy as np

from dcp_pipeline.core.errors import FormatError

__all__ = ["Column", "pack_columns", "unpack_columns"]

Column = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

MAX_ROWS = 1 << 28
_LEVEL = 1
# At this level zlib makes a byte of at most 230 equal ones.
_MAX_RATIO, _FREE_VALUES = 256, 1 << 20


def pack_columns(columns: Mapping[str, Column]) -> bytes:
    """Pack int64 arrays of one or two dimensions; see the module for the format."""
    header: list[tuple[str, list[int], int, int]] = []
    blobs: list[bytes] = []
    for name, column in columns.items():
        width, raw = _narrow(_difference(column))
        blob = zlib.compress(raw, _LEVEL)
        header.append((name, list(column.shape), width, len(blob)))
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, *blobs])


def unpack_columns(data: bytes | memoryview) -> dict[str, Column]:
    """The inverse of :func:`pack_columns`; allocates at most 8 MiB, and 2 KiB per byte of ``data``.

    Raises:
        FormatError: the data is cut off or its header does not fit it.
    """
    view = memoryview(data)
    try:
        (length,) = struct.unpack_from("<I", view)
        header = json.loads(bytes(view[4 : 4 + length]))
        position = 4 + length
        counts = [_count(shape) for _, shape, _, _ in header]
        if sum(counts) > _FREE_VALUES + _MAX_RATIO * len(view):
            raise ValueError(f"{len(view)} bytes that claim {sum(counts)} numbers")
        columns: dict[str, Column] = {}
        for (name, shape, width, size), count in zip(header, counts, strict=True):
            blob = view[position : position + size]
            columns[str(name)] = _unpack_one(blob, shape, count, width)
            position += size
    except (struct.error, ValueError, TypeError, KeyError, zlib.error, RecursionError) as error:
        raise FormatError(f"packed columns are damaged: {error}") from error
    return columns


def _count(shape: object) -> int:
    if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
        raise ValueError("a column without one or two dimensions")
    if any(type(extent) is not int or not 0 <= extent <= MAX_ROWS for extent in shape):
        raise ValueError(f"shape {str(shape)[:80]} is absurd")
    return math.prod(shape)


def _unpack_one(blob: memoryview, shape: list[int], count: int, width: int) -> Column:
    if width not in (1, 2, 4, 8):
        raise ValueError(f"width {width}")
    if count * width > 1100 * (len(blob) + 64):
        raise ValueError(f"{len(blob)} deflated bytes cannot hold shape {shape}")
    inflater = zlib.decompressobj()
    raw = inflater.decompress(blob, count * width + 1)
    if len(raw) != count * width:
        raise ValueError(f"{len(raw)} bytes for shape {shape}")
    if not inflater.eof or inflater.unused_data:
        raise ValueError("a column does not end where it should")
    if width == 1:
        # Most columns of most tables: nothing to shuffle, and often one value in all rows.
        if len(shape) == 1 and count and raw.count(0, 1) == count - 1:
            return np.full(shape, np.frombuffer(raw[:1], np.int8)[0], np.int64)
        narrow = np.frombuffer(raw, np.int8).reshape(shape)
    else:
        shuffled = np.frombuffer(raw, np.uint8).reshape(width, count)
        narrow = np.ascontiguousarray(shuffled.T).view(f"<i{width}").reshape(shape)
    return np.add.accumulate(narrow, axis=0, dtype=np.int64)


def _difference(column: Column) -> Column:
    if column.dtype != np.int64:
        raise TypeError(f"columns are int64, not {column.dtype}")
    difference = column.copy()
    difference[1:] -= column[:-1]
    return difference


def _narrow(values: Column) -> tuple[int, bytes]:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    width = next(w for w in (1, 2, 4, 8) if -(1 << 8 * w - 1) <= low and high < 1 << 8 * w - 1)
    flat = np.ascontiguousarray(values.astype(f"<i{width}")).reshape(-1)
    return width, np.ascontiguousarray(flat.view(np.uint8).reshape(-1, width).T).tobytes()
