"""U06 beyond one replicated model: how evenly the bytes are shared where holders differ."""

import numpy as np
import pytest

from dcp_pipeline.core.table import ChunkTable, KeySpec, concatenate
from dcp_pipeline.core.tiling import check_tiling
from dcp_pipeline.planning.default import DefaultPlanner
from tests.planning.states import LLAMA_8B, keys_of, replicated, sharded, table_of

LIMIT = 1.05


def written_by(tables: list[ChunkTable]) -> np.ndarray:
    """Bytes that each rank writes; every byte once."""
    plan = DefaultPlanner().global_plan(tables)
    check_tiling(plan.table, np.zeros(len(plan.names), bool))
    table = plan.table
    return np.bincount(table.owner, weights=table.nbytes, minlength=len(tables))


def is_even(written: np.ndarray) -> bool:
    return bool(written.max() <= LIMIT * written.mean())


def joined(*parts: ChunkTable) -> ChunkTable:
    """Tables of one rank, over the keys of all of them."""
    keys: list[KeySpec] = []
    moved = []
    for part in parts:
        table = part.take(np.arange(len(part)))
        table.key[:] += len(keys)
        moved.append(table)
        keys += part.keys
    return concatenate(moved, keys)


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_replicas_beside_shards(world_size: int) -> None:
    matrices = keys_of({name: shape for name, shape in LLAMA_8B.items() if len(shape) == 2})
    ema = keys_of({f"ema.{name}": shape for name, shape in LLAMA_8B.items()})
    tables = [
        joined(sharded(matrices, rank, world_size), replicated(ema, rank))
        for rank in range(world_size)
    ]
    assert is_even(written_by(tables))


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_replicas_make_up_for_uneven_shards(world_size: int) -> None:
    """The last ranks hold no shard of small matrices; they write more of what all hold."""
    uneven = keys_of({f"w{n}": (world_size // 2, 1 << 16) for n in range(20)})
    shared = keys_of({f"r{n}": (512, 1 << 13) for n in range(20)})
    tables = [
        joined(sharded(uneven, rank, world_size), replicated(shared, rank))
        for rank in range(world_size)
    ]
    assert is_even(written_by(tables))


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_hsdp(groups: int) -> None:
    """Shards over 8 ranks, each held by as many ranks as there are groups."""
    matrices = keys_of({name: shape for name, shape in LLAMA_8B.items() if len(shape) == 2})
    tables = [sharded(matrices, rank % 8, 8) for rank in range(8 * groups)]
    for rank, table in enumerate(tables):
        table.owner[:] = rank
    assert is_even(written_by(tables))


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_holders_within_holders(world_size: int) -> None:
    """Something that all hold, something that half of them hold, and so on, as stages do."""
    sizes = [world_size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    keys = keys_of({f"held by {size}": (size * 64, 4096) for size in sizes})
    tables = [
        table_of(
            keys,
            [(k, (0, 0), key.shape) for k, key in enumerate(keys) if rank < sizes[k]],
            rank,
        )
        for rank in range(world_size)
    ]
    written = written_by(tables)
    # The first rank alone holds 64 rows, and what it holds with others can be left to them.
    least = max(
        written.sum() / world_size,
        *(sum(64 * 4096 * 2 * size for size in sizes[n:]) / sizes[n] for n in range(len(sizes))),
    )
    assert written.max() <= LIMIT * least


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_one_huge_tensor(world_size: int) -> None:
    keys = keys_of({"embed": (128256, 4096), "bias": (7,)})
    assert is_even(written_by([replicated(keys, rank) for rank in range(world_size)]))


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_one_tensor_much_larger_than_the_rest(world_size: int) -> None:
    keys = keys_of({f"a{n}": (100, 10) for n in range(50)} | {"big": (1 << 14, 1 << 12)})
    assert is_even(written_by([replicated(keys, rank) for rank in range(world_size)]))


@pytest.mark.parametrize("world_size", [4, 8, 64])
def test_many_small_tensors(world_size: int) -> None:
    """None of them is large enough to be split."""
    keys = keys_of({f"w{n}": (n % 7 + 1, 100) for n in range(20_000)})
    plan_of = [replicated(keys, rank) for rank in range(world_size)]
    written = written_by(plan_of)
    assert is_even(written)


def test_a_tensor_of_few_rows_is_split_along_those() -> None:
    """Three rows over four ranks: what cannot be split evenly is made up for by the rest."""
    keys = keys_of({"wide": (3, 1 << 20), **{f"w{n}": (64, 1 << 12) for n in range(40)}})
    assert is_even(written_by([replicated(keys, rank) for rank in range(4)]))
