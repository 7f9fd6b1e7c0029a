"""Discovery and retention: T08; T01 as the manager sees it."""

import errno
from pathlib import Path

import pytest
import torch

from dcp_pipeline.core.errors import IncompleteCheckpointError
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.pipeline import Pipeline
from tests.cases.jobs import pipeline_of


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


def committed(path: Path) -> None:
    Pipeline().save(state(0.0), path)


def test_t08_only_directories_that_are_steps_count_and_are_deleted(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, pipeline_of(), keep_last=1)
    name = Path(manager.path(7)).name
    others = [f"{name}.backup", f"foo-{name}", f"{name}-old", "notes", name.replace("7", "x")]
    for other in others:
        committed(tmp_path / other)
    for step in (7, 100):
        committed(Path(manager.path(step)))
    assert manager.steps() == [7, 100] and manager.latest() == 100
    manager.save(200, state(2.0))
    assert manager.steps() == [200]
    manager.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*others, Path(manager.path(200)).name]
    )


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, list(range(10, 260, 10))),
        ({"keep_last": 1}, [250]),
        ({"keep_last": 3}, [230, 240, 250]),
        ({"keep_last": 2, "keep_every": 100}, [100, 200, 240, 250]),
        ({"keep_last": 1, "keep_every": 70}, [70, 140, 210, 250]),
    ],
)
def test_t12_what_is_kept(tmp_path: Path, keep: dict[str, int], left: list[int]) -> None:
    settings = {"storage": {"sync_files": False}}
    manager = CheckpointManager(tmp_path, pipeline_of(settings), **keep)
    for step in range(10, 260, 10):
        manager.save(step, state(float(step)))
    assert manager.steps() == left
    found = state(0.0)
    assert manager.restore(found) == 250 and found["w"][0] == 250


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, pipeline_of())
    for step in (9, 10, 100, 2):
        manager.save(step, state(float(step)))
    assert manager.steps() == [2, 9, 10, 100] and manager.latest() == 100


@pytest.mark.parametrize("method", ["write", "replace"])
def test_t01_a_save_that_fails_leaves_the_step_before_as_the_latest(
    tmp_path: Path, method: str
) -> None:
    manager = CheckpointManager(tmp_path, pipeline_of(), keep_last=1)
    manager.save(1, state(1.0))
    fault = {"kind": "faulty", "method": method, "code": errno.ENOSPC}
    failing = CheckpointManager(tmp_path, pipeline_of({"storage": fault}), keep_last=1)
    with pytest.raises(OSError, match="No space left"):
        failing.save(2, state(2.0))
    assert manager.steps() == [1] and manager.latest() == 1
    found = state(0.0)
    assert manager.restore(found) == 1 and found["w"][0] == 1


def test_t01_an_unfinished_step_is_called_incomplete(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, pipeline_of())
    for step in (1, 2):
        manager.save(step, state(float(step)))
    for record in ("manifest.json", ".metadata"):
        (Path(manager.path(2)) / record).unlink()
    assert manager.steps() == [1] and manager.latest() == 1
    with pytest.raises(IncompleteCheckpointError, match="incomplete"):
        manager.restore(state(0.0), step=2)


def test_nothing_to_restore(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "none", pipeline_of())
    assert manager.steps() == [] and manager.latest() is None
    assert manager.restore(state(0.0)) is None
    with pytest.raises(FileNotFoundError):
        manager.restore(state(0.0), step=3)
