"""Saved under any sharding, loaded under any other: bit-equal, every byte written once."""

import itertools
import math
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.storage.memory import _DIRECTORIES
from tests.equal import bits
from tests.marks import slow
from tests.properties.shards import Sharding, dtensor_of, meshes, part_of, shapes, shardings
from tests.properties.threads import Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.complex128, torch.bool)

State = dict[str, tuple[torch.Tensor, Sharding]]


CONFIGS = [("torch_save", "each"), ("safetensors", "once")]


@pytest.fixture(scope="module", params=CONFIGS, ids=" ".join)
def threads(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    # Boxes of any size are split among writers, and blocks are small: more boundaries to cross.
    config = {
        "storage": "memory",
        "serialization": request.param[0],
        "read_replicas": request.param[1],
        "planner": {"split_bytes": 1},
        "layout": {"block_bytes": "4KiB"},
    }
    ranks = Ranks(config)
    yield ranks
    ranks.close()


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = math.prod(shape) * dtype.itemsize
    raw = (torch.arange(count) * 151 + seed).to(torch.uint8)
    if dtype is torch.bool:
        return (raw & 1).bool().reshape(shape)
    return raw.view(dtype).reshape(shape)


def of_rank(state: State, rank: int, is_empty: bool) -> dict[str, Any]:
    """What a rank holds of a state; without the values if they are to be loaded."""
    result: dict[str, Any] = {}
    for name, (whole, sharding) in state.items():
        part = part_of(whole, sharding, rank)
        if is_empty:
            bits(part).fill_(0 if part.dtype is torch.bool else 0xA5)
        result[name] = dtensor_of(part, tuple(whole.shape), sharding, rank)
    return result


def goes_through(threads: Ranks, source: State, target: State) -> None:
    """Save as ``source`` and load as ``target``, which names the same tensors."""
    path = f"memory://{uuid.uuid4().hex}"
    ranks = math.prod(next(iter(source.values()))[1].mesh)

    def save(pipeline: Pipeline, rank: int) -> Manifest:
        return pipeline.save(of_rank(source, rank, is_empty=False), path).manifest

    manifests = threads.run(ranks, save)
    writes_every_byte_once(manifests[0], source)

    def load(pipeline: Pipeline, rank: int) -> None:
        state = of_rank(target, rank, is_empty=True)
        report = pipeline.load(state, path)
        assert report.is_verified and sorted(report.loaded) == sorted(target)
        for name, (whole, sharding) in target.items():
            found, wanted = state[name].to_local(), part_of(whole, sharding, rank)
            assert torch.equal(bits(found), bits(wanted)), (name, rank)

    try:
        threads.run(math.prod(next(iter(target.values()))[1].mesh), load)
    finally:
        for key in [key for key in _DIRECTORIES if key.startswith(path)]:
            del _DIRECTORIES[key]


def writes_every_byte_once(manifest: Manifest, state: State) -> None:
    """The chunks tile every tensor, counted cell by cell, and the payloads do not share bytes."""
    table = manifest.table
    for name, (whole, _) in state.items():
        key = manifest.names.index(name)
        times = np.zeros(tuple(whole.shape), np.int64)
        for row in np.flatnonzero(table.key == key):
            offsets, sizes = table.boxes(int(row))
            times[tuple(slice(b, b + n) for b, n in zip(offsets, sizes, strict=True))] += 1
        assert (times == 1).all(), name
    assert int(table.nbytes.sum()) == sum(
        whole.numel() * whole.element_size() for whole, _ in state.values()
    )
    begin = table.offset + table.payload
    order = np.lexsort([begin, table.file])
    end = (begin + table.nbytes)[order]
    same_file = np.diff(table.file[order]) == 0
    assert (end[:-1] <= begin[order][1:])[same_file].all()


@st.composite
def states(draw: st.DrawFn) -> tuple[State, State]:
    """Up to three tensors, sharded in two ways."""
    meshes_drawn = draw(meshes()), draw(meshes())
    source: State = {}
    target: State = {}
    for position in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        whole = tensor_of(shape, draw(st.sampled_from(DTYPES)), position)
        source[f"w{position}"] = whole, draw(shardings(shape, meshes_drawn[0]))
        target[f"w{position}"] = whole, draw(shardings(shape, meshes_drawn[1]))
    return source, target


@settings(max_examples=60, deadline=None)
@given(pair=states())
def test_from_any_sharding_to_any(threads: Ranks, pair: tuple[State, State]) -> None:
    goes_through(threads, *pair)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=2000, deadline=None)
@given(pair=states())
def test_from_any_sharding_to_any_at_length(threads: Ranks, pair: tuple[State, State]) -> None:
    goes_through(threads, *pair)


def every_sharding(shape: tuple[int, ...]) -> Iterator[Sharding]:
    kinds = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    kinds += [_StridedShard(d, split_factor=2) for d in range(len(shape))]
    for mesh in ((1,), (2,), (3,), (4,), (2, 2)):
        for placements in itertools.product(kinds, repeat=len(mesh)):
            yield Sharding(mesh, placements)


@pytest.mark.parametrize(
    "threads", [slow(CONFIGS[0]), CONFIGS[1]], ids=" ".join, indirect=True, scope="module"
)
def test_every_sharding_of_a_matrix_to_every_mesh(threads: Ranks) -> None:
    """One save on each mesh holds the matrix under all placements of that mesh; so does a load."""
    by_mesh: dict[tuple[int, ...], list[Sharding]] = {}
    for sharding in every_sharding((5, 3)):
        by_mesh.setdefault(sharding.mesh, []).append(sharding)
    whole = tensor_of((5, 3), torch.float32, 1)
    count = max(map(len, by_mesh.values()))
    for source, target in itertools.product(by_mesh.values(), repeat=2):
        # Each placement of the source meets a different one of the target in every pair of meshes.
        goes_through(
            threads,
            {f"w{n}": (whole, source[n % len(source)]) for n in range(count)},
            {f"w{n}": (whole, target[(n * 7 + n // len(target)) % len(target)])
             for n in range(count)},
        )  # fmt: skip
