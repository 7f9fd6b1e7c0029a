"""Resharding and planning: T42, T44, T45, T50, T54; and the kind behind each."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_pipeline.core.manifest import Manifest
from tests.cases.jobs import files, pipeline_of
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.marks import mostly_slow, slow
from tests.state.placements import placements_of

SHAPES: list[tuple[int, ...]] = [(6,), (2,), (5,), (1,), (7, 3), (3, 1, 4), (4, 4)]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(dtype).reshape(shape)


def save_sharded(path: Path, mesh_shape: list[int], placements: list[str], config: dict) -> None:
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    state = {
        f"w{number}": distribute_tensor(numbered(shape), mesh, placements_of(placements))
        for number, shape in enumerate(SHAPES)
    }
    with pipeline_of(config) as pipeline:
        pipeline.save(state, path)


def load_sharded(path: Path, layouts: list[tuple[list[int], list[str]]], config: dict) -> None:
    """Load into shards full of -1, once for each layout; each has to be its part of the source."""
    for mesh_shape, placements in layouts:
        mesh = init_device_mesh("cpu", tuple(mesh_shape))
        state = {
            f"w{number}": distribute_tensor(
                torch.full(shape, -1.0), mesh, placements_of(placements), src_data_rank=None
            )
            for number, shape in enumerate(SHAPES)
        }
        with pipeline_of(config) as pipeline:
            assert pipeline.load(state, path).is_verified
        for number, shape in enumerate(SHAPES):
            assert_same(state[f"w{number}"].full_tensor(), numbered(shape))


LAYOUTS = [
    ([4], ["S0"]),
    ([3], ["S0"]),
    ([2], ["S-1"]),
    ([2], ["R"]),
    ([2, 2], ["S0", "S0"]),
    ([2, 2], ["S0", "S-1"]),
    ([2, 2], ["R", "S0"]),
    ([2, 2], ["S-1", "R"]),
]


@pytest.mark.parametrize(
    ("mesh", "placements"), mostly_slow(LAYOUTS, [LAYOUTS[1], LAYOUTS[2], LAYOUTS[5]]), ids=str
)
def test_t42_t44_uneven_and_empty_shards_load_in_any_other_way(
    ranks: Pool, tmp_path: Path, mesh: list[int], placements: list[str]
) -> None:
    config = {"serialization": "safetensors" if len(mesh) == 2 else "torch_save"}
    ranks(math.prod(mesh)).run(save_sharded, tmp_path, mesh, placements, config)
    for size in (1, 3, 4):
        fitting = [layout for layout in LAYOUTS if math.prod(layout[0]) == size]
        ranks(size).run(load_sharded, tmp_path, fitting or [([1], ["R"])], config)


def test_t42_a_single_process_without_a_group_loads_the_shards(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_sharded, tmp_path, [2, 2], ["S0", "S0"], {})
    state = {f"w{number}": torch.full(shape, -1.0) for number, shape in enumerate(SHAPES)}
    with pipeline_of() as pipeline:
        pipeline.load(state, tmp_path)
    for number, shape in enumerate(SHAPES):
        assert_same(state[f"w{number}"], numbered(shape))


class TwoLayers(nn.Module):
    def __init__(self, outer: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(outer, inner)
        self.down = nn.Linear(inner, outer)


def two_dimensional(sizes: tuple[int, int], seed: int) -> nn.Module:
    """FSDP2 over tensor parallelism: the placements are strided."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = TwoLayers(*sizes)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["dp"])


def save_two_dimensional(path: Path, sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    model = two_dimensional(sizes, seed=1)
    state = model.state_dict()
    kinds = {type(p).__name__ for v in state.values() if isinstance(v, DTensor)
             for p in v.placements}  # fmt: skip
    assert "_StridedShard" in kinds
    with pipeline_of() as pipeline:
        pipeline.save({"model": state}, path)
    return {name: value.full_tensor() for name, value in state.items()}


def load_two_dimensional(path: Path, sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    state = two_dimensional(sizes, seed=2).state_dict()
    with pipeline_of() as pipeline:
        pipeline.load({"model": state}, path)
    return {name: value.full_tensor() for name, value in state.items()}


@pytest.mark.parametrize(
    "sizes",
    [slow((6, 10)), (5, 7), slow((3, 3)), slow((8, 4)), (1, 9)],
    ids=str,
)
def test_t45_fsdp2_over_tensor_parallelism(
    ranks: Pool, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    source = ranks(4).run(save_two_dimensional, tmp_path, sizes)[0]
    plain = {"model": {name: torch.full_like(value, -1) for name, value in source.items()}}
    with pipeline_of() as pipeline:
        pipeline.load(plain, tmp_path)
    assert_same(plain["model"], source)
    for loaded in ranks(4).run(load_two_dimensional, tmp_path, sizes):
        assert_same(loaded, source)


def save_in_groups(paths: list[Path], groups: list[list[int]]) -> str:
    """Each group saves and loads in its own directory, at the same time."""
    made = [dist.new_group(members) for members in groups]
    mine = next(i for i, members in enumerate(groups) if dist.get_rank() in members)
    value = float(mine + 1)
    state = {"w": torch.full((9,), value), f"r{dist.get_rank()}": value, "all": torch.arange(3)}
    empty = {"w": torch.zeros(9), f"r{dist.get_rank()}": 0.0, "all": torch.zeros(3).long()}
    with pipeline_of() as pipeline:
        for _ in range(2):
            saved = pipeline.save(state, paths[mine], process_group=made[mine])
        pipeline.load(empty, paths[mine], process_group=made[mine])
    assert_same(empty, state)
    return saved.manifest.save_id


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0], [1, 2, 3]]], ids=str)
def test_t50_groups_save_into_directories_of_their_own(
    ranks: Pool, tmp_path: Path, groups: list[list[int]]
) -> None:
    paths = [tmp_path / str(number) for number in range(len(groups))]
    save_ids = ranks(4).run(save_in_groups, paths, groups)
    assert len(set(save_ids)) == len(groups)
    for path, members in zip(paths, groups, strict=True):
        manifest = Manifest.decode((path / "manifest.json").read_bytes())
        assert manifest.world_size == len(members)
        assert set(manifest.names) == {"w", "all"} | {f"r{rank}" for rank in members}


VALUES: dict[str, list[Any]] = {
    "shapes": [torch.ones(3), torch.ones(4)],
    "dimensions": [torch.ones(3), torch.ones(3, 1)],
    "dtypes": [torch.ones(3), torch.ones(3, dtype=torch.float64)],
    "a tensor and a value": [torch.ones(3), 3],
    "values": [torch.ones(3), torch.zeros(3)],
    "one bit": [torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0])],
    "python values": [3, 4],
    "lists": [[1, 2], [1, 3]],
    "types": [1, 1.0],
    "truth": [1, True],
}


def save_value_of_rank(path: Path, values: list[Any], config: dict[str, Any]) -> None:
    state = {"fine": torch.ones(2), "section": {"own": values[dist.get_rank() % len(values)]}}
    with pipeline_of(config) as pipeline:
        pipeline.save(state, path)


@pytest.mark.parametrize("what", VALUES)
def test_t53_t54_ranks_that_differ_under_one_key(ranks: Pool, tmp_path: Path, what: str) -> None:
    for failure in ranks(3).fail(save_value_of_rank, tmp_path, VALUES[what], {}):
        assert failure.is_a("StateError")
        assert "section.own" in failure.message and "fine" not in failure.message
        assert "0" in failure.message and "1" in failure.message
    assert files(tmp_path) == []


@pytest.mark.parametrize("what", ["shapes", "dimensions", "dtypes", "a tensor and a value"])
def test_t54_different_shapes_are_refused_even_unchecked(
    ranks: Pool, tmp_path: Path, what: str
) -> None:
    config = {"planner": {"check_replicas": False}}
    for failure in ranks(2).fail(save_value_of_rank, tmp_path, VALUES[what], config):
        assert failure.is_a("ShapeConflictError")
        assert "section.own" in failure.message
        assert "rank 0" in failure.message and "rank 1" in failure.message


def test_t53_unchecked_the_value_of_one_rank_is_kept_whole(ranks: Pool, tmp_path: Path) -> None:
    values = [torch.full((5000,), float(rank)) for rank in range(2)]
    config = {"planner": {"check_replicas": False, "dedup": "lowest_rank"}}
    ranks(2).run(save_value_of_rank, tmp_path, values, config)
    state = {"fine": torch.zeros(2), "section": {"own": torch.full((5000,), -1.0)}}
    with pipeline_of() as pipeline:
        pipeline.load(state, tmp_path)
    assert_same(state["section"]["own"], values[0])


def save_partial_dtensors(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"r": distribute_tensor(numbered((6,)), mesh, [Replicate()]), "s": distribute_tensor(
        numbered((6,)), mesh, [Shard(0)])}  # fmt: skip
    state["partial"] = DTensor.from_local(numbered((6,)), mesh, placements_of(["P"]))
    with pipeline_of() as pipeline:
        pipeline.save({"deep": state}, path)


def test_partial_placements_are_refused_by_name(ranks: Pool, tmp_path: Path) -> None:
    for failure in ranks(2).fail(save_partial_dtensors, tmp_path):
        assert failure.is_a("UnsupportedLeafError") and "deep.partial" in failure.message
    assert files(tmp_path) == []
