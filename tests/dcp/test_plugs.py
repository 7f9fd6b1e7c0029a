"""Ours plugs into DCP and DCP's into ours: writers, readers, planners, in every combination."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline import FileSystemReader, FileSystemWriter
from dcp_pipeline.core.errors import CheckpointExistsError, CheckpointNotFoundError, ChecksumError
from tests.distributed.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROWS = 21


class Renaming(dcp.DefaultSavePlanner):
    """A user's planner: keys get a prefix, and the metadata a note."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"ema.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        notes = {**metadata.planner_data, "note": ("made by", "Renaming")}
        return plans, dataclasses.replace(metadata, planner_data=notes)


class Halving(dcp.DefaultSavePlanner):
    """A user's planner that changes the data on its way."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        changed = super().transform_object(write_item, object)
        return changed / 2 if isinstance(changed, torch.Tensor) else changed


class Prefixed(dcp.DefaultLoadPlanner):
    """Finds what :class:`Renaming` has written."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.caller = state_dict
        self.renamed = {f"ema.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(self.renamed, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)
        key = read_item.dest_index.fqn.removeprefix("ema.")
        if key in self.caller:
            self.caller[key] = self.renamed[f"ema.{key}"]


class CountingWriter(dcp.FileSystemWriter):
    """A user's storage writer."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.calls: list[str] = []

    def write_data(self, plan: Any, planner: Any) -> Any:
        self.calls.append("write_data")
        return super().write_data(plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self.calls.append("finish")
        super().finish(metadata, results)


def state(fill: float | None = None) -> dict[str, Any]:
    values = torch.arange(ROWS * 4.0).reshape(ROWS, 4)
    weight = values if fill is None else torch.full_like(values, fill)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {"w": distribute_tensor(weight, mesh, [Shard(0)]), "lr": 0.5 if fill is None else 0}
    return {"w": weight, "tt": weight.clone().t(), "lr": 0.5 if fill is None else 0}


def assert_loaded(loaded: dict[str, Any], factor: float = 1.0) -> None:
    for key, wanted in state().items():
        found = loaded[key]
        if isinstance(found, DTensor):
            found, wanted = found.to_local(), wanted.to_local()
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(found, wanted * factor), key
        else:
            assert found == wanted, key


def every_combination(path: Path, serialization: str) -> None:
    config = {"serialization": serialization}
    writes = {
        "dcp.save, our writer": lambda p: dcp.save(
            state(), storage_writer=FileSystemWriter(p, config=config)
        ),
        "ours, our writer": lambda p: dcp_pipeline.save(
            state(), storage_writer=FileSystemWriter(p, config=config, thread_count=1)
        ),
        "ours, their planner": lambda p: dcp_pipeline.save(
            state(), checkpoint_id=p, planner=dcp.DefaultSavePlanner(), config=config
        ),
        "ours": lambda p: dcp_pipeline.save(state(), checkpoint_id=p, config=config),
    }
    if serialization == "torch_save":
        writes["ours, their writer"] = lambda p: dcp_pipeline.save(
            state(), storage_writer=dcp.FileSystemWriter(p)
        )
        writes["theirs"] = lambda p: dcp.save(state(), checkpoint_id=p)
    reads = {
        "dcp.load, our reader": lambda s, p: dcp.load(s, storage_reader=FileSystemReader(p)),
        "ours, our reader": lambda s, p: dcp_pipeline.load(s, storage_reader=FileSystemReader(p)),
        "ours, their planner": lambda s, p: dcp_pipeline.load(
            s, checkpoint_id=p, planner=dcp.DefaultLoadPlanner()
        ),
        "ours": lambda s, p: dcp_pipeline.load(s, checkpoint_id=p),
    }
    if serialization == "torch_save":
        reads["theirs"] = lambda s, p: dcp.load(s, checkpoint_id=p)
        reads["ours, their reader"] = lambda s, p: dcp_pipeline.load(
            s, storage_reader=dcp.FileSystemReader(p)
        )
    for number, (written, write) in enumerate(writes.items()):
        write(path / str(number))
        for read, load in reads.items():
            loaded = state(fill=-1.0)
            load(loaded, path / str(number))
            try:
                assert_loaded(loaded)
            except AssertionError as error:
                raise AssertionError(f"written by {written}, read by {read}") from error


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_every_combination(tmp_path: Path, serialization: str) -> None:
    every_combination(tmp_path, serialization)


@pytest.mark.parametrize(
    ("serialization", "size"),
    [
        ("torch_save", 2),
        ("safetensors", 2),
        pytest.param("torch_save", 4, marks=pytest.mark.slow),
    ],
)
def test_every_combination_on_ranks(
    ranks: Pool, tmp_path: Path, serialization: str, size: int
) -> None:
    ranks(size).run(every_combination, tmp_path, serialization)


def users_planners(path: Path) -> None:
    metadata = dcp_pipeline.save(state(), checkpoint_id=path / "named", planner=Renaming())
    assert metadata.planner_data["note"] == ("made by", "Renaming")
    assert set(metadata.state_dict_metadata) == {f"ema.{key}" for key in state()}
    loaded = state(fill=-1.0)
    dcp_pipeline.load(loaded, checkpoint_id=path / "named", planner=Prefixed())
    assert_loaded(loaded)
    nested = {"ema": state(fill=-1.0)}
    dcp_pipeline.load(
        {f"ema.{k}": v for k, v in nested["ema"].items()}, checkpoint_id=path / "named"
    )
    dcp_pipeline.save(state(), checkpoint_id=path / "half", planner=Halving())
    loaded = state(fill=-1.0)
    dcp_pipeline.load(loaded, checkpoint_id=path / "half")
    assert_loaded({**loaded, "lr": 0.5}, factor=0.5)


def test_planners_of_a_user(ranks: Pool, tmp_path: Path) -> None:
    users_planners(tmp_path / "alone")
    ranks(2).run(users_planners, tmp_path / "ranks")


def test_a_writer_of_a_user(tmp_path: Path) -> None:
    writer = CountingWriter(tmp_path)
    dcp_pipeline.save(state(), storage_writer=writer)
    assert writer.calls == ["write_data", "finish"]
    loaded = state(fill=-1.0)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_loaded(loaded)


def test_the_lower_level_functions(tmp_path: Path) -> None:
    dcp_pipeline.save_state_dict(state(), FileSystemWriter(tmp_path / "a"))
    dcp_pipeline.save_state_dict(state(), dcp.FileSystemWriter(tmp_path / "b"))
    for path in (tmp_path / "a", tmp_path / "b"):
        for reader in (FileSystemReader(path), dcp.FileSystemReader(path)):
            loaded = state(fill=-1.0)
            dcp_pipeline.load_state_dict(loaded, reader)
            assert_loaded(loaded)


def coordinate_elsewhere(path: Path) -> int:
    dcp_pipeline.save_state_dict(state(), FileSystemWriter(path), coordinator_rank=1)
    loaded = state(fill=-1.0)
    dcp_pipeline.load_state_dict(loaded, FileSystemReader(path), coordinator_rank=1)
    assert_loaded(loaded)
    return dist.get_rank()


def test_another_rank_coordinates(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(coordinate_elsewhere, tmp_path) == [0, 1]


def test_our_writer_replaces_and_refuses(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path))
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises((CheckpointExistsError, dcp.CheckpointException)):
        dcp.save(state(), storage_writer=FileSystemWriter(tmp_path, overwrite=False))
    assert {path.name for path in tmp_path.iterdir()} == before
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path))
    after = {path.name for path in tmp_path.iterdir()}
    assert len(after) == len(before) and after != before


def test_our_reader_verifies_under_dcp(tmp_path: Path) -> None:
    dcp_pipeline.save(state(), checkpoint_id=tmp_path)
    data = next(tmp_path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)
    with pytest.raises((ChecksumError, dcp.CheckpointException), match="digest"):
        dcp.load(state(), storage_reader=FileSystemReader(tmp_path))


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises((CheckpointNotFoundError, dcp.CheckpointException)):
        dcp_pipeline.load(state(), storage_reader=FileSystemReader(tmp_path))


@pytest.mark.parametrize("planner", [None, dcp.DefaultLoadPlanner(), Prefixed()])
def test_what_is_missing_is_named_whatever_the_planner(tmp_path: Path, planner: Any) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        dcp_pipeline.load(state(), checkpoint_id=tmp_path / "nowhere", planner=planner)
    with pytest.raises(dcp.CheckpointException):
        dcp_pipeline.load(state(), checkpoint_id=tmp_path / "nowhere", planner=planner)


class NodeError(Exception):
    """Of a user, raised behind the last agreement."""


def test_an_error_of_one_rank_alone_is_torchs_too(tmp_path: Path) -> None:
    def fail(manifest: Any) -> None:
        raise NodeError("at the very end")

    pipeline = dcp_pipeline.Pipeline(
        dcp_pipeline.PipelineConfig(),
        save_nodes=[dcp_pipeline.Node("late", fail, ("manifest",), ("nothing",))],
    )
    with pipeline, pytest.raises(NodeError, match="at the very end") as caught:
        pipeline.save(state(), tmp_path)
    assert isinstance(caught.value, dcp.CheckpointException)
    assert isinstance(caught.value.__cause__, NodeError)
    assert set(caught.value.failures) == {0}


def test_without_collectives(tmp_path: Path) -> None:
    dcp_pipeline.save(state(), checkpoint_id=tmp_path, use_collectives=False)
    assert (tmp_path / "__0.metadata").exists()
    loaded = state(fill=-1.0)
    dcp_pipeline.load(loaded, storage_reader=FileSystemReader(tmp_path), planner=Prefixless())
    assert_loaded(loaded)


class Prefixless(dcp.DefaultLoadPlanner):
    """Any planner: with one, DCP's protocol looks for each rank's own metadata."""
