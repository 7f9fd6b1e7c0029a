"""``MegaStorageWriter`` and ``MegaStorageReader`` under plain DCP, and under ours."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline import MegaStorageReader, MegaStorageWriter
from dcp_pipeline.core.errors import CheckpointExistsError, ChecksumError, UnsupportedLeafError
from tests.distributed.pool import Pool
from tests.mega_files import SAMPLES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(value: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(21.0).view(7, 3) + value, "b": torch.ones(3).bfloat16()},
        "step": 3,
        "pair": (1, {"a": b"x"}),
    }


def blank() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(7, 3), "b": torch.zeros(3).bfloat16()},
        "step": 0,
        "pair": None,
    }


def assert_loaded(found: dict[str, Any]) -> None:
    assert torch.equal(found["model"]["w"], state()["model"]["w"])
    assert torch.equal(found["model"]["b"], state()["model"]["b"])
    assert found["step"] == 3


@pytest.mark.parametrize("saver", [dcp, dcp_pipeline])
@pytest.mark.parametrize("loader", [dcp, dcp_pipeline])
def test_one_process(tmp_path: Path, saver: Any, loader: Any) -> None:
    saver.save(state(), storage_writer=MegaStorageWriter(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["model.mega"]
    template = blank()
    if loader is dcp:
        del template["pair"]  # plain DCP flattens what it finds in the template alone
    loader.load(template, storage_reader=MegaStorageReader(tmp_path, thread_count=2))
    assert_loaded(template)
    loaded = dcp_pipeline.load_keys(tmp_path, config={"layout": "mega"})
    assert torch.equal(loaded["model"]["w"], state()["model"]["w"])
    assert loaded["step"] == 3


def test_compressed(tmp_path: Path) -> None:
    settings = {"compression": "zstd", "shuffle": True}
    large = {"w": torch.arange(50_000).view(500, 100), "v": torch.zeros(300), "n": 1}
    dcp.save(large, storage_writer=MegaStorageWriter(tmp_path, serialization=settings))
    assert (tmp_path / "model.mega").stat().st_size < 100_000
    template = {"w": torch.zeros(500, 100, dtype=torch.int64), "v": torch.ones(300), "n": 0}
    dcp.load(template, storage_reader=MegaStorageReader(tmp_path))
    assert torch.equal(template["w"], large["w"]) and not template["v"].any()


def test_a_sample_is_read_by_plain_dcp(tmp_path: Path) -> None:
    (tmp_path / "x.mega").write_bytes((SAMPLES / "chunked_crc32.mega").read_bytes())
    template = {"x": torch.zeros(2, 4)}
    dcp.load(template, storage_reader=MegaStorageReader(tmp_path))
    assert torch.equal(template["x"], torch.arange(8.0).view(2, 4))


def test_damage_is_found(tmp_path: Path) -> None:
    data = (SAMPLES / "two_corrupt_payload.mega").read_bytes()
    (tmp_path / "x.mega").write_bytes(data)
    template = {"w.a": torch.zeros(2, 3)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(template, storage_reader=MegaStorageReader(tmp_path))
    (cause,) = [error for error, _ in caught.value.failures.values()]
    assert isinstance(cause, ChecksumError) and "x.mega, w.a is damaged" in str(cause)
    dcp.load(template, storage_reader=MegaStorageReader(tmp_path, verify=False))
    assert template["w.a"][1, 2] == 5


def test_settings(tmp_path: Path) -> None:
    writer = MegaStorageWriter(tmp_path, overwrite=False, serialization={"checksum": "sha256"})
    dcp.save(state(), storage_writer=writer)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state(), storage_writer=writer)
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    with pytest.raises(dcp_pipeline.CheckpointError, match=r"speed: unknown key"):
        MegaStorageWriter(tmp_path, serialization={"speed": 3})


def test_what_it_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({"z": torch.zeros(2, dtype=torch.complex64)},
                 storage_writer=MegaStorageWriter(tmp_path))  # fmt: skip
    cause = caught.value.failures[0][0]
    assert isinstance(cause, UnsupportedLeafError)
    assert "'z' is a tensor of torch.complex64" in str(cause)
    assert list(tmp_path.iterdir()) == []


def sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = torch.arange(21.0).view(7, 3) + value
    return {"w": distribute_tensor(tensor, mesh, [Shard(0)]), "r": torch.full((4,), value)}


def save_on_ranks(path: Path, value: float) -> None:
    dcp.save(sharded(value), storage_writer=MegaStorageWriter(path))


def load_on_ranks(path: Path) -> bool:
    template = sharded(0.0)
    dcp.load(template, storage_reader=MegaStorageReader(path))
    whole = template["w"]
    assert isinstance(whole, DTensor)
    expected = torch.arange(21.0).view(7, 3) + 2
    return torch.equal(whole.full_tensor(), expected) and bool((template["r"] == 2).all())


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_on_ranks(ranks: Pool, tmp_path: Path, before: int, after: int) -> None:
    for value in (1.0, 2.0):
        ranks(before).run(save_on_ranks, tmp_path, value)
        assert len(list(tmp_path.iterdir())) == before + 1
    assert all(ranks(after).run(load_on_ranks, tmp_path))
