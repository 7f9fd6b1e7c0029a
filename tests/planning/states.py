"""Chunk tables of synthetic jobs; no tensor has memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind

__all__ = ["LLAMA_8B", "keys_of", "replicated", "sharded", "table_of"]


def _llama_8b() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, 4096)}
    for layer in range(32):
        prefix = f"layers.{layer}"
        shapes |= {
            f"{prefix}.q": (4096, 4096),
            f"{prefix}.k": (1024, 4096),
            f"{prefix}.v": (1024, 4096),
            f"{prefix}.o": (4096, 4096),
            f"{prefix}.gate": (14336, 4096),
            f"{prefix}.up": (14336, 4096),
            f"{prefix}.down": (4096, 14336),
            f"{prefix}.norm1": (4096,),
            f"{prefix}.norm2": (4096,),
        }
    return shapes | {"norm": (4096,), "head": (128256, 4096)}


LLAMA_8B = _llama_8b()


def keys_of(shapes: dict[str, tuple[int, ...]], dtype: str = "bfloat16") -> tuple[KeySpec, ...]:
    return tuple(KeySpec((name,), Kind.TENSOR, dtype, shape) for name, shape in shapes.items())


def table_of(
    keys: Sequence[KeySpec],
    boxes: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    rank: int = 0,
) -> ChunkTable:
    """Rows ``(key, offsets, sizes)`` of one rank."""
    key, offsets, sizes = [list(part) for part in zip(*boxes, strict=True)] if boxes else ([],) * 3
    return ChunkTable.build(keys, key, offsets, sizes, rank)


def replicated(keys: Sequence[KeySpec], rank: int = 0, digest: int = 0) -> ChunkTable:
    """Every tensor whole."""
    shapes = [key.shape for key in keys]
    zeros = [(0,) * len(shape) for shape in shapes]
    table = ChunkTable.build(keys, range(len(keys)), zeros, shapes, rank, [digest] * len(keys))
    table.length[:] = [math.prod(shape) * 2 for shape in shapes]
    return table


def sharded(keys: Sequence[KeySpec], rank: int, world_size: int) -> ChunkTable:
    """Each tensor cut along its first dimension as ``torch.chunk`` does; 2-dim keys alone."""
    shape = np.asarray([key.shape for key in keys], np.int64)
    step = -(-shape[:, 0] // world_size)
    begin = np.minimum(step * rank, shape[:, 0])
    count = np.minimum(begin + step, shape[:, 0]) - begin
    held = np.flatnonzero(count)
    zeros = np.zeros(len(held), np.int64)
    columns = {
        "key": held,
        "offsets": np.stack([begin[held], zeros], axis=1),
        "sizes": np.stack([count[held], shape[held, 1]], axis=1),
        "owner": np.full(len(held), rank, np.int64),
    }
    return ChunkTable.from_columns(keys, columns)
