"""Commit: T01, T02, T03, T14, T15. A checkpoint is the old one or the new one, on all ranks."""

import errno
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.storage.file_directory import FileSystemDirectory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.cases.jobs import files, load, pipeline_of, save, state_with, values_of
from tests.distributed.pool import Pool
from tests.marks import mostly_slow

FAULTS = {
    "data is created": {"method": "create", "names": "*.distcp"},
    "data is reserved": {"method": "reserve", "names": "*.distcp"},
    "data is written": {"method": "write", "names": "*.distcp"},
    "data is half written": {"method": "write", "names": "*.distcp", "when": "halfway"},
    "data is synced": {"method": "sync", "names": "*.distcp"},
    "data is closed": {"method": "close", "names": "*.distcp"},
    "sums are written": {"method": "write", "names": "*.sums"},
    "sums are synced": {"method": "sync", "names": "*.sums"},
}
COMMIT_FAULTS = {
    "the lock is taken": {"method": "symlink"},
    "the record is written": {"method": "write", "names": ".manifest.json.*"},
    "the record is synced": {"method": "sync", "names": ".manifest.json.*"},
    "the record is replaced": {"method": "replace", "names": "manifest.json"},
}


def faulty(fault: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"storage": {"kind": "faulty", "code": errno.EIO, **fault, **more}}


def owned(path: Path) -> set[str]:
    """What the commit record says should lie in a directory."""
    manifest = Manifest.decode((path / "manifest.json").read_bytes())
    names = {entry.name for entry in (*manifest.files, *manifest.sums)}
    return names | {"manifest.json", ".metadata"}


ALL_FAULTS = [(name, rank) for name in FAULTS for rank in (0, 1)]
ALL_FAULTS += [(name, 0) for name in COMMIT_FAULTS]
ALWAYS = [(name, number % 2) for number, name in enumerate(FAULTS)]
ALWAYS += [(name, 0) for name in COMMIT_FAULTS]


@pytest.mark.parametrize(("fault", "rank"), mostly_slow(ALL_FAULTS, ALWAYS))
def test_t02_a_save_over_a_checkpoint_fails_when(
    ranks: Pool, tmp_path: Path, fault: str, rank: int
) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    before = files(tmp_path)
    setting = faulty(FAULTS.get(fault) or COMMIT_FAULTS[fault], on_rank=rank)
    for failure in ranks(2).fail(save, tmp_path, 2.0, setting):
        assert failure.is_a("CheckpointException") and failure.is_a("OSError")
        assert failure.errno == errno.EIO
        assert list(failure.failures) == [rank]
        assert f"rank {rank}" in failure.message
    assert files(tmp_path) == before
    assert ranks(2).run(load, tmp_path) == [{1.0}, {1.0}]


@pytest.mark.parametrize(
    "fault",
    [
        {"method": "replace", "names": "manifest.json", "when": "after"},
        {"method": "write", "names": ".metadata.*"},
        {"method": "replace", "names": ".metadata"},
    ],
)
def test_a_commit_that_cannot_be_finished_is_a_commit(
    ranks: Pool, tmp_path: Path, fault: dict[str, Any]
) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    old = owned(tmp_path)
    for failure in ranks(2).fail(save, tmp_path, 2.0, faulty(fault, on_rank=0)):
        assert failure.is_a("UnfinishedCommitError") and failure.is_a("CheckpointException")
        assert failure.errno == errno.EIO and "holds the new checkpoint" in failure.message
    # A loss of power may bring the old one back.
    assert old <= set(files(tmp_path))
    assert ranks(2).run(load, tmp_path) == [{2.0}, {2.0}]
    # What could not be finished is finished by the next save.
    ranks(2).run(save, tmp_path, 3.0)
    assert set(files(tmp_path)) == owned(tmp_path)


def test_old_files_that_cannot_be_removed_fail_no_save(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    fault = {"method": "remove", "names": "*.distcp"}
    save_ids = ranks(2).run(save, tmp_path, 2.0, faulty(fault, on_rank=0))
    assert save_ids[0] == save_ids[1]
    assert ranks(2).run(load, tmp_path) == [{2.0}, {2.0}]
    ranks(2).run(save, tmp_path, 3.0)
    assert set(files(tmp_path)) == owned(tmp_path)


def test_t01_a_first_save_that_fails_leaves_nothing_that_loads(ranks: Pool, tmp_path: Path) -> None:
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    ranks(2).run(save, first, 1.0)
    ranks(2).fail(save, second, 2.0, faulty({"method": "symlink"}, on_rank=0))
    assert files(second) == []
    for failure in ranks(2).fail(load, second):
        assert failure.is_a("CheckpointNotFoundError") and failure.is_a("FileNotFoundError")
    assert ranks(2).run(load, first) == [{1.0}, {1.0}]


def test_t01_data_without_a_commit_record_is_called_incomplete(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / ".metadata").unlink()
    for failure in ranks(2).fail(load, tmp_path):
        assert failure.is_a("IncompleteCheckpointError")
        assert failure.errno == errno.ENOENT
        assert "incomplete" in failure.message and str(tmp_path) in failure.message


CHANGES = [(4, 2), (4, 1), (2, 4), (1, 4)]


@pytest.mark.parametrize(
    ("serialization", "change"),
    mostly_slow(
        product(["torch_save", "safetensors"], CHANGES),
        [
            ("torch_save", (4, 2)),
            ("safetensors", (4, 1)),
            ("safetensors", (2, 4)),
            ("torch_save", (1, 4)),
        ],
    ),
)
def test_t03_a_save_on_another_number_of_ranks_replaces_all_of_it(
    ranks: Pool, tmp_path: Path, change: tuple[int, int], serialization: str
) -> None:
    before, after = change
    config = {"serialization": serialization}
    ranks(before).run(save, tmp_path, 1.0)
    old = set(files(tmp_path))
    ranks(after).run(save, tmp_path, 2.0, config)
    left = owned(tmp_path) - ({".metadata"} if serialization == "safetensors" else set())
    assert set(files(tmp_path)) == left
    assert not (old & left) - {"manifest.json", ".metadata"}
    manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
    assert manifest.world_size == after
    assert not {f"of{rank}" for rank in range(after, 4)} & set(manifest.names)
    assert ranks(after).run(load, tmp_path, config) == [{2.0}] * after


def test_t03_overwrite_error_raises_before_anything_is_touched(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save, tmp_path, 1.0)
    before = {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)}
    for failure in ranks(2).fail(save, tmp_path, 2.0, {"overwrite": "error"}):
        assert failure.is_a("CheckpointExistsError") and failure.is_a("FileExistsError")
        assert failure.errno == errno.EEXIST and str(tmp_path) in failure.message
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in files(tmp_path)} == before
    assert ranks(4).run(load, tmp_path) == [{1.0}] * 4


def save_in_subgroup(path: Path, members: list[int], value: float) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        state = {"only": value, "w": torch.full((3,), value)}
        with pipeline_of() as pipeline:
            pipeline.save(state, path, process_group=group)


def test_t03_some_ranks_of_a_world_save_alone_over_all_of_them(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save, tmp_path, 1.0)
    ranks(4).run(save_in_subgroup, tmp_path, [0, 1], 2.0)
    assert set(files(tmp_path)) == owned(tmp_path)
    manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
    assert manifest.names == ("only", "w") and manifest.world_size == 2


class BlindDirectory(FileSystemDirectory):
    """A directory in which this rank sees nothing, as on a file system that is late."""

    def exists(self, name: str) -> bool:
        return False

    def names(self) -> list[str]:
        return []


class BlindStorage(FileSystemStorage):
    def open(self, checkpoint_id: str) -> FileSystemDirectory:
        return BlindDirectory(self, super().open(checkpoint_id).location)


def load_blind_on(rank: int, path: Path) -> tuple[set[float], float]:
    state = state_with(-1.0)
    pipeline = pipeline_of()
    if dist.get_rank() == rank:
        object.__setattr__(pipeline._parts, "storage", BlindStorage())
    started = time.monotonic()
    pipeline.load(state, path)
    return values_of(state), time.monotonic() - started


def test_t14_one_rank_decides_whether_a_checkpoint_is_there(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    for values, seconds in ranks(2).run(load_blind_on, 1, tmp_path):
        assert values == {1.0} and seconds < 5


class LayoutThatFails:
    """A layout that only the coordinator may ask."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        if name in ("open", "current", "replaced_names"):
            raise AssertionError(f"rank {dist.get_rank()} looks at the directory by itself")
        return getattr(self._layout, name)


def save_and_load_with_layout_on_0(path: Path) -> set[float]:
    pipeline = pipeline_of()
    if dist.get_rank():
        object.__setattr__(pipeline._parts, "layout", LayoutThatFails(pipeline._parts.layout))
    pipeline.save(state_with(1.0), path)
    state = state_with(-1.0)
    pipeline.load(state, path)
    return values_of(state)


def test_t14_no_other_rank_looks_at_the_commit_record(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(3).run(save_and_load_with_layout_on_0, tmp_path) == [{1.0}] * 3


@pytest.mark.parametrize("places", [["a", "b"], ["a", "a", "b"], ["a", "b", "c", "a"]])
def test_t15_ranks_that_name_different_checkpoints(
    ranks: Pool, tmp_path: Path, places: list[str]
) -> None:
    paths = [tmp_path / place for place in places]
    for failure in ranks(len(paths)).fail(save, paths, 1.0):
        assert failure.is_a("DisagreementError") and failure.is_a("CheckpointException")
        assert all(str(path) in failure.message for path in paths)
    assert os.listdir(tmp_path) == []


def save_with_config_of(path: Path, thread_counts: list[int]) -> None:
    save(path, 1.0, {"storage": {"thread_count": thread_counts[dist.get_rank()]}})


def test_t15_ranks_with_different_configs(ranks: Pool, tmp_path: Path) -> None:
    for failure in ranks(2).fail(save_with_config_of, tmp_path, [1, 2]):
        assert failure.is_a("DisagreementError")
        assert "config" in failure.message and "[0]" in failure.message
    assert os.listdir(tmp_path) == []


def load_from(paths: list[Path]) -> None:
    load(paths[dist.get_rank()])


def test_t15_ranks_that_load_different_checkpoints(ranks: Pool, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        ranks(2).run(save, path, 1.0)
    for failure in ranks(2).fail(load_from, paths):
        assert failure.is_a("DisagreementError")
        assert all(str(path) in failure.message for path in paths)
