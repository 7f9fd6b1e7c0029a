import itertools

import numpy as np
import pytest

from dcp_pipeline.core.errors import ReplicaMismatchError, ShapeConflictError, TilingError
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.core.tiling import check_tiling
from dcp_pipeline.planning.base import GlobalPlan
from dcp_pipeline.planning.default import DefaultPlanner
from tests.planning.states import LLAMA_8B, keys_of, replicated, sharded, table_of


def loads(plan: GlobalPlan, world_size: int) -> np.ndarray:
    table = plan.table
    return np.bincount(table.owner, weights=table.nbytes, minlength=world_size)


def holds(plan: GlobalPlan, tables: list[ChunkTable]) -> None:
    """Every chunk lies inside the row of its owner that it is said to be a part of."""
    for row in range(len(plan.table)):
        local = tables[plan.table.owner[row]]
        offsets, sizes = plan.table.boxes(row)
        begin, extent = local.boxes(int(plan.row[row]))
        assert all(b <= o and o + s <= b + e
                   for o, s, b, e in zip(offsets, sizes, begin, extent, strict=True))  # fmt: skip
        key = plan.keys[plan.table.owner[row]][local.key[plan.row[row]]]
        assert key == plan.table.key[row]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
def test_u06_replicated_llama_is_written_evenly(world_size: int) -> None:
    keys = keys_of(LLAMA_8B)
    tables = [replicated(keys, rank) for rank in range(world_size)]
    plan = DefaultPlanner().global_plan(tables)
    written = loads(plan, world_size)
    assert written.sum() == tables[0].nbytes.sum()
    assert written.max() <= 1.05 * written.mean()
    # A tensor is cut at most once for each boundary between two writers.
    assert len(plan.table) <= len(keys) + world_size
    holds(plan, tables)


@pytest.mark.parametrize("seed", range(10))
def test_states_of_any_mixture_are_written_evenly(seed: int) -> None:
    """Replicas on all ranks, on some, and shards of unequal size."""
    random = np.random.default_rng(seed)
    world_size = int(random.integers(2, 9))
    shapes = {f"w{i}": tuple(map(int, random.integers(1, 400, 2))) for i in range(60)}
    keys = keys_of(shapes)
    group = [
        sorted(random.choice(world_size, int(random.integers(1, world_size + 1)), replace=False))
        for _ in keys
    ]
    tables = [
        table_of(
            keys, [(k, (0, 0), key.shape) for k, key in enumerate(keys) if rank in group[k]], rank
        )
        for rank in range(world_size)
    ]
    plan = DefaultPlanner(split_bytes=1).global_plan(tables)
    holds(plan, tables)
    check_tiling(plan.table, np.zeros(len(keys), bool))
    again = DefaultPlanner(split_bytes=1).global_plan(tables)
    assert np.array_equal(again.table.owner, plan.table.owner)


def test_the_lowest_rank_writes_all_replicas_when_asked() -> None:
    keys = keys_of(LLAMA_8B)
    plan = DefaultPlanner(dedup="lowest_rank").global_plan([replicated(keys, r) for r in range(4)])
    assert len(plan.table) == len(keys) and not plan.table.owner.any()


@pytest.mark.parametrize("split_bytes", [1 << 40, 200_000_000])
def test_small_replicas_are_not_split(split_bytes: int) -> None:
    keys = keys_of(LLAMA_8B)
    planner = DefaultPlanner(split_bytes=split_bytes)
    plan = planner.global_plan([replicated(keys, r) for r in range(8)])
    cut = np.flatnonzero(np.bincount(plan.table.key, minlength=len(keys)) > 1)
    whole = replicated(keys).nbytes
    assert all(whole[key] >= split_bytes for key in cut)


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
def test_shards_stay_with_their_ranks(world_size: int) -> None:
    keys = keys_of({f"w{i}": (i + 1, 16) for i in range(100)})
    tables = [sharded(keys, rank, world_size) for rank in range(world_size)]
    plan = DefaultPlanner().global_plan(tables)
    assert len(plan.table) == sum(map(len, tables))
    holds(plan, tables)


def test_ranks_with_keys_of_their_own() -> None:
    tables = [replicated(keys_of({f"only{rank}": (3,), "all": (4,)}), rank) for rank in range(3)]
    plan = DefaultPlanner().global_plan(tables)
    assert plan.names == ("only0", "all", "only1", "only2")
    assert [plan.names[key] for key in plan.keys[2]] == ["only2", "all"]
    holds(plan, tables)


def test_a_rank_without_anything() -> None:
    keys = keys_of({"a": (4,)})
    plan = DefaultPlanner().global_plan([table_of((), []), replicated(keys, 1), table_of((), [])])
    assert plan.table.owner.tolist() == [1]
    empty = DefaultPlanner().global_plan([table_of((), []), table_of((), [])])
    assert len(empty.table) == 0 and empty.names == ()


def test_replicas_with_different_digests_are_refused_by_key_and_ranks() -> None:
    keys = keys_of({"fine": (4,), "torn": (4,)})
    tables = [replicated(keys, rank, digest=7) for rank in range(4)]
    tables[2].digest[1] = tables[3].digest[1] = 9
    with pytest.raises(ReplicaMismatchError) as caught:
        DefaultPlanner().global_plan(tables)
    said = str(caught.value)
    assert "'torn'" in said and "fine" not in said and "1 keys" in said
    assert "[0, 1]" in said and "[2, 3]" in said
    DefaultPlanner(check_replicas=False).global_plan(tables)


def test_digests_that_were_not_taken_are_not_compared() -> None:
    keys = keys_of({"a": (4,)})
    tables = [replicated(keys, rank, digest=digest) for rank, digest in enumerate([0, 5, 0, 5])]
    DefaultPlanner().global_plan(tables)
    tables[2].digest[0] = 6
    with pytest.raises(ReplicaMismatchError, match=r"\[1, 3\].*\[2\]"):
        DefaultPlanner().global_plan(tables)


@pytest.mark.parametrize(
    "other",
    [
        KeySpec(("a",), Kind.TENSOR, "bfloat16", (5,)),
        KeySpec(("a",), Kind.TENSOR, "float32", (4,)),
        KeySpec(("a",), Kind.ARRAY, "bfloat16", (4,)),
        KeySpec(("a",), Kind.VALUE),
    ],
)
def test_ranks_that_disagree_about_a_key(other: KeySpec) -> None:
    mine = replicated(keys_of({"a": (4,)}), 0)
    shape = other.shape
    theirs = table_of([other], [(0, (0,) * len(shape), shape)], 1)
    with pytest.raises(ShapeConflictError, match=r"'a'.*rank 0.*rank 1"):
        DefaultPlanner().global_plan([mine, theirs])


BOXES = {
    "a gap at the end": ([(0, 0), (1, 0)], [(1, 4), (2, 4)], "gap"),
    "a gap in the middle": ([(0, 0), (3, 0)], [(2, 4), (1, 4)], "gap"),
    "an overlap": ([(0, 0), (1, 0)], [(3, 4), (3, 4)], "overlap"),
    "one inside the other": ([(0, 0), (1, 1)], [(4, 4), (1, 1)], "overlap"),
    "a gap and an overlap of one volume": ([(0, 0), (1, 0)], [(2, 4), (2, 4)], "overlap"),
    "out of bounds": ([(0, 0), (3, 0)], [(3, 4), (2, 4)], "out of bounds"),
    "negative": ([(-1, 0), (0, 0)], [(1, 4), (4, 4)], "out of bounds"),
    "a missing corner": ([(0, 0), (0, 2), (2, 0)], [(2, 2), (2, 2), (2, 2)], "gap"),
    "crossing": ([(0, 0), (0, 0)], [(4, 2), (2, 4)], "overlap"),
    "a wrong dimension": ([(0, 0), (0, 2)], [(4, 3), (4, 2)], "overlap"),
}


@pytest.mark.parametrize("name", BOXES)
def test_t49_chunks_that_do_not_tile_are_named(name: str) -> None:
    offsets, sizes, word = BOXES[name]
    keys = keys_of({"fine": (2, 2), "torn": (4, 4)})
    tables = [table_of(keys, [(0, (0, 0), (2, 2))], 0)]
    tables += [
        table_of(keys, [(1, begin, extent)], rank + 1)
        for rank, (begin, extent) in enumerate(zip(offsets, sizes, strict=True))
    ]
    with pytest.raises(TilingError) as caught:
        DefaultPlanner().global_plan(tables)
    said = str(caught.value)
    assert "torn" in said and "fine" not in said and word in said
    assert "rank" in said and "offsets" in said and "sizes" in said


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (2, 3, 4)])
@pytest.mark.parametrize("seed", range(5))
def test_any_grid_is_fine_and_any_change_to_it_is_found(shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    edges = [sorted({0, extent, *map(int, random.integers(1, extent + 1, 2))}) for extent in shape]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    boxes = [
        (0, [low for low, _ in cell], [high - low for low, high in cell])
        for cell in itertools.product(*spans)
    ]
    keys = keys_of({"w": shape})
    skip = np.zeros(1, bool)
    random.shuffle(boxes)
    check_tiling(table_of(keys, boxes), skip)
    for changed in (boxes[1:], [*boxes, boxes[0]]):
        if changed:
            with pytest.raises(TilingError, match="w of shape"):
                check_tiling(table_of(keys, changed), skip)
    if len(boxes) > 1:
        key, offsets, sizes = boxes[0]
        grown = [(key, offsets, [sizes[0] + 1, *sizes[1:]]), *boxes[1:]]
        with pytest.raises(TilingError):
            check_tiling(table_of(keys, grown), skip)


def test_tensors_without_elements_and_values() -> None:
    keys = (*keys_of({"none": (0, 3), "scalar": ()}), KeySpec(("value",), Kind.VALUE))
    skip = np.zeros(3, bool)
    check_tiling(table_of(keys, [(1, (), ()), (2, (), ())]), skip)
    for boxes, name in (
        ([(1, (), ())], "value"),
        ([(2, (), ())], "scalar"),
        ([(1, (), ()), (2, (), ()), (2, (), ())], "value"),
    ):
        with pytest.raises(TilingError, match=name):
            check_tiling(table_of(keys, boxes), skip)


def test_t49_a_quarter_of_a_million_chunks_are_checked_without_a_loop_over_them() -> None:
    keys = keys_of({f"w{i}": (256, 8) for i in range(1024)})
    tables = [sharded(keys, rank, 256) for rank in range(256)]
    plan = DefaultPlanner().global_plan(tables)
    assert len(plan.table) == 1 << 18
    plan.table.sizes[12345, 0] += 1
    with pytest.raises(TilingError):
        check_tiling(plan.table, np.zeros(len(keys), bool))


def test_colliding_paths_get_names_that_do_not_depend_on_the_ranks() -> None:
    def table(paths: list[tuple], rank: int) -> ChunkTable:
        return replicated([KeySpec(path, Kind.TENSOR, "bfloat16", (2,)) for path in paths], rank)

    paths: list[tuple] = [("a.b",), ("a", "b"), ("a", "b.c"), ("a.b.c",)]
    plans = [
        DefaultPlanner().global_plan([table(order[:2], 0), table(order[2:], 1)])
        for order in itertools.permutations(paths)
    ]
    named = [
        {spec.path: name for name, spec in zip(plan.names, plan.table.keys, strict=True)}
        for plan in plans
    ]
    assert all(names == named[0] for names in named)
    assert len(set(named[0].values())) == 4
