"""The same on real ranks: every placement on every number of ranks, and random states."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_pipeline.api import load, save
from tests.distributed.pool import Pool
from tests.equal import bits
from tests.marks import mostly_slow
from tests.properties.shards import MESHES, Sharding, part_of, shapes, shardings

MATRIX = torch.arange(21.0).reshape(7, 3)
PLACEMENTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}

State = list[tuple[torch.Tensor, Sharding]]


def of_rank(state: State, is_empty: bool) -> list[DTensor]:
    result = []
    for whole, sharding in state:
        mesh = init_device_mesh("cpu", sharding.mesh)
        part = part_of(whole, sharding, dist.get_rank())
        if is_empty:
            bits(part).fill_(0xA5)
        result.append(
            DTensor.from_local(
                part,
                mesh,
                sharding.placements,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
        )
    return result


def write(path: Path, state: State) -> dict[str, int]:
    """Save; the elements that are stored of each key."""
    tensors = of_rank(state, is_empty=False)
    manifest = save(
        {f"w{n}": tensor for n, tensor in enumerate(tensors)}, checkpoint_id=path
    ).manifest
    volumes: dict[str, int] = dict.fromkeys(manifest.names, 0)
    for row, key in enumerate(manifest.table.key):
        volumes[manifest.names[key]] += math.prod(manifest.table.boxes(row)[1])
    return volumes


def read(path: Path, state: State) -> None:
    tensors = of_rank(state, is_empty=True)
    load({f"w{n}": tensor for n, tensor in enumerate(tensors)}, checkpoint_id=path)
    for (whole, sharding), tensor in zip(state, tensors, strict=True):
        wanted = part_of(whole, sharding, dist.get_rank())
        assert torch.equal(bits(tensor.to_local()), bits(wanted)), (sharding, tensor)


@pytest.mark.parametrize("saved_on", mostly_slow([1, 2, 3, 4], [2, 3]))
def test_t46_every_placement_to_every_other_on_1_to_4_ranks(
    ranks: Pool, tmp_path: Path, saved_on: int
) -> None:
    # Nine keys: each placement of the save meets each placement of the load.
    saved = [(MATRIX + n, Sharding((saved_on,), (p,)))
             for n, p in enumerate(p for p in PLACEMENTS.values() for _ in PLACEMENTS)]  # fmt: skip
    for volumes in ranks(saved_on).run(write, tmp_path, saved):
        assert volumes == {f"w{n}": 21 for n in range(9)}
    for loaded_on in (1, 2, 3, 4):
        others = [*PLACEMENTS.values()] * 3
        wanted = [
            (whole, Sharding((loaded_on,), (p,)))
            for (whole, _), p in zip(saved, others, strict=True)
        ]
        ranks(loaded_on).run(read, tmp_path, wanted)


@st.composite
def states(draw: st.DrawFn) -> tuple[State, State]:
    saved, loaded = draw(st.sampled_from(MESHES)), draw(st.sampled_from(MESHES))
    wholes = []
    for seed in range(draw(st.integers(4, 8))):
        shape = draw(shapes())
        wholes.append(torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + seed)
    return tuple(
        [(whole, draw(shardings(tuple(whole.shape), mesh))) for whole in wholes]
        for mesh in (saved, loaded)
    )  # type: ignore[return-value]


def size_of(state: State) -> int:
    return math.prod(state[0][1].mesh)


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(pair=states())
def test_from_any_sharding_to_any(ranks: Pool, tmp_path_factory: Any, pair: Any) -> None:
    path = tmp_path_factory.mktemp("any")
    source, target = pair
    volumes = ranks(size_of(source)).run(write, path, source)[0]
    assert volumes == {f"w{n}": whole.numel() for n, (whole, _) in enumerate(source)}
    ranks(size_of(target)).run(read, path, target)
