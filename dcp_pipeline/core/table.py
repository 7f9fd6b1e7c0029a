"""The value that flows through both graphs: one row per chunk of a tensor or per byte item."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.packing import Column, pack_columns, unpack_columns
from dcp_pipeline.core.path import Path, decode_path, encode_path

__all__ = ["ChunkTable", "KeySpec", "Kind", "decode_keys", "encode_keys"]

MAX_DIMENSIONS = 64


class Kind(StrEnum):
    """What a key's value is in the caller's state."""

    TENSOR = "tensor"
    VALUE = "value"
    """A Python value, stored as bytes."""
    STREAM = "stream"
    """An ``io.BytesIO``, stored as the value of its bytes."""
    ARRAY = "array"
    """A NumPy array, stored as a tensor."""
    SCALAR = "scalar"
    """A NumPy scalar, stored as a 0-dim tensor."""


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One entry of the state.

    Attributes:
        path: where it lies.
        kind: what it is there.
        dtype: name of the element type (``"bfloat16"``), ``None`` for a value.
        shape: global shape; ``()`` for a value.
        alias: index of the key of the same table whose storage this one shares, or -1.
    """

    path: Path
    kind: Kind = Kind.TENSOR
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    alias: int = -1

    @property
    def item_size(self) -> int:
        """Bytes of one element; 1 for a value, whose row is one byte item."""
        return 1 if self.dtype is None else ITEM_SIZES[self.dtype]


_ONE_COLUMN = ("key", "owner", "file", "offset", "length", "payload", "digest")


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Columns over the chunks of a state; every column is int64, ``n`` rows.

    Attributes:
        keys: what the ``key`` column points into.
        key: ``[n]`` index into ``keys``.
        offsets: ``[n, d]`` where the chunk starts in the global tensor; ``d`` is the largest number
            of dimensions, unused ones are 0.
        sizes: ``[n, d]`` its extent; unused dimensions are 1.
        owner: ``[n]`` the rank that holds or writes it.
        file: ``[n]`` index into the list of files, -1 while unknown.
        offset: ``[n]`` where the item starts in its file, bytes.
        length: ``[n]`` bytes of the item, framing included.
        payload: ``[n]`` where the raw elements start within the item, -1 where unknown.
        digest: ``[n]`` hash of the elements, to compare replicas; 0 where not taken.
    """

    keys: tuple[KeySpec, ...]
    key: Column
    offsets: Column
    sizes: Column
    owner: Column
    file: Column
    offset: Column
    length: Column
    payload: Column
    digest: Column

    @classmethod
    def build(
        cls,
        keys: Sequence[KeySpec],
        key: Sequence[int] | Column,
        offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        owner: int = 0,
        digest: Sequence[int] | Column | None = None,
    ) -> ChunkTable:
        """A table of chunks that have no place in a file yet.

        Args:
            offsets, sizes: one sequence per row, as long as the key has dimensions.
        """
        rows = len(key)
        width = max((len(row) for row in sizes), default=0)
        return cls(
            keys=tuple(keys),
            key=np.asarray(key, np.int64),
            offsets=_padded(offsets, width, 0),
            sizes=_padded(sizes, width, 1),
            owner=np.full(rows, owner, np.int64),
            file=np.full(rows, -1, np.int64),
            offset=np.full(rows, -1, np.int64),
            length=np.zeros(rows, np.int64),
            payload=np.full(rows, -1, np.int64),
            digest=np.zeros(rows, np.int64) if digest is None else np.asarray(digest, np.int64),
        )

    def __len__(self) -> int:
        return len(self.key)

    @property
    def dimensions(self) -> int:
        """Columns of ``offsets`` and ``sizes``."""
        return int(self.offsets.shape[1])

    @property
    def item_sizes(self) -> Column:
        """``[n]`` bytes of one element of each row's tensor."""
        return np.asarray([spec.item_size for spec in self.keys], np.int64)[self.key]

    @property
    def nbytes(self) -> Column:
        """``[n]`` bytes of each row's elements; a value's is its ``length``."""
        is_value = np.asarray([spec.dtype is None for spec in self.keys], bool)[self.key]
        return np.where(is_value, self.length, self.sizes.prod(axis=1) * self.item_sizes)

    def take(self, rows: Column | np.ndarray) -> ChunkTable:
        """The table of the given rows (indices or a mask), in that order, over the same keys."""
        picked = {name: getattr(self, name)[rows] for name in (*_ONE_COLUMN, "offsets", "sizes")}
        return replace(self, **picked)

    def sort(self) -> ChunkTable:
        """Rows in the order of a manifest: by key, then by offsets."""
        return self.take(self.order())

    def order(self) -> Column:
        """``[n]`` the rows in the order of a manifest."""
        columns = [self.offsets[:, d] for d in reversed(range(self.dimensions))]
        return np.lexsort([*columns, self.key]).astype(np.int64)

    def widen(self, dimensions: int) -> ChunkTable:
        """The same rows with at least ``dimensions`` columns of offsets and sizes."""
        extra = dimensions - self.dimensions
        if extra <= 0:
            return self
        pad = ((0, 0), (0, extra))
        return replace(
            self,
            offsets=np.pad(self.offsets, pad),
            sizes=np.pad(self.sizes, pad, constant_values=1),
        )

    def boxes(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of one row, as long as its key has dimensions."""
        width = len(self.keys[self.key[row]].shape)
        return tuple(map(int, self.offsets[row, :width])), tuple(map(int, self.sizes[row, :width]))

    def columns(self, *names: str) -> dict[str, Column]:
        """The named columns, with ``offsets`` and ``sizes``, as a plain mapping."""
        return {name: getattr(self, name) for name in ("offsets", "sizes", *names)}

    def pack(self) -> bytes:
        """The whole table as bytes; equal keys give equal leading bytes (see :func:`unpack`)."""
        keys = encode_keys(self.keys)
        columns = pack_columns(self.columns(*_ONE_COLUMN))
        return b"".join([struct.pack("<I", len(keys)), keys, columns])

    @classmethod
    def unpack(
        cls, data: bytes | memoryview, cache: dict[bytes, tuple[KeySpec, ...]] | None = None
    ) -> ChunkTable:
        """The inverse of :meth:`pack`.

        Args:
            cache: decoded keys by their packed bytes; the keys of ranks that hold the same are
                decoded once.
        """
        try:
            (size,) = struct.unpack_from("<I", data)
        except struct.error as error:
            raise FormatError(f"packed table is damaged: {error}") from error
        packed = bytes(memoryview(data)[4 : 4 + size])
        keys = cache.get(packed) if cache is not None else None
        if keys is None:
            keys = decode_keys(packed)
            if cache is not None:
                cache[packed] = keys
        return cls.from_columns(keys, unpack_columns(memoryview(data)[4 + size :]))

    @classmethod
    def from_columns(cls, keys: Sequence[KeySpec], columns: dict[str, Column]) -> ChunkTable:
        """A table of unpacked columns, checked for shape and range.

        Raises:
            FormatError: a column is missing, has another length, or points outside ``keys``.
        """
        rows = len(columns.get("key", ()))
        filled = dict(columns)
        defaults = {"owner": 0, "file": -1, "offset": -1, "length": 0, "payload": -1, "digest": 0}
        for name, value in defaults.items():
            filled.setdefault(name, np.full(rows, value, np.int64))
        names = (*_ONE_COLUMN, "offsets", "sizes")
        missing = [name for name in names if name not in filled]
        if missing:
            raise FormatError(f"the chunk table lacks the columns {missing}")
        wrong = [name for name in names if filled[name].shape[0] != rows]
        if wrong or filled["offsets"].shape != filled["sizes"].shape or filled["sizes"].ndim != 2:
            raise FormatError(f"columns of the chunk table differ in length: {wrong or 'offsets'}")
        if rows and not (0 <= filled["key"].min() and filled["key"].max() < len(keys)):
            raise FormatError("the chunk table points at keys that are not there")
        return cls(keys=tuple(keys), **{name: filled[name] for name in names})


def concatenate(tables: Sequence[ChunkTable], keys: Sequence[KeySpec]) -> ChunkTable:
    """Rows of several tables, whose ``key`` columns point into one list of ``keys`` already."""
    width = max((table.dimensions for table in tables), default=0)
    wide = [table.widen(width) for table in tables]
    names = (*_ONE_COLUMN, "offsets", "sizes")
    if not wide:
        return ChunkTable.build(keys, [], [], [])
    return ChunkTable(
        keys=tuple(keys),
        **{name: np.concatenate([getattr(table, name) for table in wide]) for name in names},
    )


def encode_keys(keys: Sequence[KeySpec]) -> bytes:
    """Keys as deflated JSON."""
    rows = [
        [encode_path(key.path), key.kind.value, key.dtype, list(key.shape), key.alias]
        for key in keys
    ]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 6)


def decode_keys(data: bytes) -> tuple[KeySpec, ...]:
    """The inverse of :func:`encode_keys`.

    Raises:
        FormatError: not what :func:`encode_keys` writes.
    """
    try:
        inflater = zlib.decompressobj()
        rows = json.loads(inflater.decompress(data, 1 << 30))
        return tuple(
            KeySpec(decode_path(path), Kind(kind), dtype, tuple(shape), alias)
            for path, kind, dtype, shape, alias in rows
        )
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise FormatError(f"packed keys are damaged: {error}") from error


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> Column:
    if width > MAX_DIMENSIONS:
        raise FormatError(f"{width} dimensions, at most {MAX_DIMENSIONS} are supported")
    result = np.full((len(rows), width), fill, np.int64)
    lengths = {len(row) for row in rows}
    if len(lengths) == 1:
        result[:] = np.asarray(rows, np.int64).reshape(len(rows), -1)
        return result
    for position, row in enumerate(rows):
        result[position, : len(row)] = row
    return result
