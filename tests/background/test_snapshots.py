"""Asynchronous saves in a thread and in a process: the moment of the call, in order."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_pipeline
from tests.background.pipelines import ALWAYS, pipeline_of
from tests.distributed.pool import Pool
from tests.equal import assert_same


def everything(value: int) -> dict[str, Any]:
    """One of every kind of leaf, all of which show ``value``."""
    weight = torch.full((3, 5), float(value))
    return {
        "nothing": {},
        "tensor": weight,
        "tied": weight,
        "strided": torch.full((4, 6), value).t(),
        "bytes": torch.full((7,), value, dtype=torch.uint8),
        "small": torch.full((2,), float(value)).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 3),
        "conj": torch.full((2,), complex(value, 1)).conj(),
        "array": np.full(3, value),
        "number": value,
        "list": [value, {"deep": value}],
        "nested": {"dict": {"n": value}, "tensors": [torch.full((2,), value)]},
        "text": f"value {value}",
    }


def in_order(value: Any) -> Any:
    """A state whose dicts are sorted."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(child) for child in value] if isinstance(value, list) else value


def change(state: dict[str, Any]) -> None:
    """What a trainer does next: every value in place, and the containers too."""
    for name in ("tensor", "strided", "bytes", "scalar"):
        state[name].fill_(77)
    state["small"].view(torch.uint8).fill_(0)
    state["array"][:] = 77
    state["number"] = 77
    state["list"].append(77)
    state["list"][1]["deep"] = 77
    state["nested"]["dict"]["n"] = 77
    state["nested"]["tensors"][0].fill_(77)
    state["nothing"]["more"] = 77
    state["text"] = "changed"


@pytest.mark.parametrize("background", ALWAYS)
def test_the_snapshot_is_the_moment_of_the_call(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        for value in range(1, 4):
            state = everything(value)
            saving = pipeline.async_save(state, tmp_path / str(value))
            change(state)
            assert isinstance(saving, Future)
        saving.result()
        for value in range(1, 4):
            loaded = dcp_pipeline.load_keys(tmp_path / str(value))
            assert_same(in_order(loaded), in_order(everything(value)))


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_what_lands_is_what_a_synchronous_save_writes(
    tmp_path: Path, background: str, serialization: str
) -> None:
    notes = {"step": 4}
    with pipeline_of(background, serialization=serialization) as pipeline:
        pipeline.save(everything(5), tmp_path / "sync", notes=notes)
        saved = pipeline.async_save(everything(5), tmp_path / "async", notes=notes)
        assert isinstance(saved, Future)
        result = saved.result()
        assert result.manifest.notes == notes
        assert {t.node for t in result.trace.timings} == {
            "collect", "stage", "plan", "agree", "write", "commit",
        }  # fmt: skip
        assert set(result.state_dict_metadata) == {n for n in result.manifest.names}
    sync, other = (
        dcp_pipeline.Manifest.decode((tmp_path / name / "manifest.json").read_bytes())
        for name in ("sync", "async")
    )
    assert sync.names == other.names and sync.empty == other.empty
    assert [file.size for file in sync.files] == [file.size for file in other.files]
    assert dcp_pipeline.verify(tmp_path / "async").is_well


def test_plain_dcp_reads_it(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        pipeline.async_save({"w": torch.arange(6.0), "step": 3}, tmp_path)
    loaded = {"w": torch.zeros(6), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["step"] == 3 and torch.equal(loaded["w"], torch.arange(6.0))


def test_nothing_to_save(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        for number in range(2):
            pipeline.async_save({}, tmp_path / str(number))
    assert dcp_pipeline.load_keys(tmp_path / "1") == {}


# On several ranks


def in_a_row(path: Path, background: str, in_flight: int) -> list[float]:
    """T23: three saves without waiting."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    state = {"shard": shard, f"own{rank}": torch.zeros(5), "step": 0}
    with pipeline_of(background, max_in_flight=in_flight) as pipeline:
        for value in range(3):
            shard.to_local().fill_(value)
            state[f"own{rank}"].fill_(value + 10 * rank)
            state["step"] = value
            pipeline.async_save(state, path / str(value))
            # Collectives of training in between never mix with those of the saves.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert float(tensor) == dist.get_world_size()
        pipeline.wait()
        found = []
        for value in range(3):
            pipeline.load(state, path / str(value))
            assert isinstance(shard, DTensor)
            assert bool((shard.full_tensor() == value).all())
            assert bool((state[f"own{rank}"] == value + 10 * rank).all())
            found.append(state["step"])
    return found


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_t23_three_saves_in_a_row(
    ranks: Pool, tmp_path: Path, background: str, in_flight: int
) -> None:
    assert ranks(2).run(in_a_row, tmp_path, background, in_flight) == [[0, 1, 2]] * 2


@pytest.mark.slow
def test_in_a_row_on_three_ranks(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(3).run(in_a_row, tmp_path, "process", 2) == [[0, 1, 2]] * 3


def two_pipelines(path: Path) -> None:
    """Saves of two pipelines at a time do not take one another's messages."""
    rank = dist.get_rank()
    pipelines = [pipeline_of("thread", max_in_flight=3) for _ in range(2)]
    for value in range(3):
        for number, pipeline in enumerate(pipelines):
            state = {f"w{rank}": torch.full((4,), float(10 * number + value))}
            pipeline.async_save(state, path / f"{number}-{value}")
    for pipeline in pipelines:
        pipeline.close()
    for number in range(2):
        for value in range(3):
            loaded = dcp_pipeline.load_keys(path / f"{number}-{value}", [f"w{rank}"])
            assert float(loaded[f"w{rank}"][0]) == 10 * number + value


def test_two_pipelines_at_a_time(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(two_pipelines, tmp_path)


def saving_beside(path: Path) -> None:
    """A synchronous save and a load while an asynchronous one is under way."""
    rank = dist.get_rank()
    state = {f"w{rank}": torch.full((4,), 1.0)}
    with pipeline_of("thread") as pipeline:
        pipeline.async_save(state, path / "first")
        state[f"w{rank}"].fill_(2)
        pipeline.save(state, path / "second")
        pipeline.load(state, path / "first")
        assert float(state[f"w{rank}"][0]) == 1
        pipeline.async_save(state, path / "third")
        pipeline.load(state, path / "second")
        assert float(state[f"w{rank}"][0]) == 2


def test_beside_synchronous_ones(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(saving_beside, tmp_path)
