"""A run under a manager, and how it can end: T07, T12."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.cli.main import main
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
)
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.tools.listing import list_directory
from dcp_pipeline.tools.prune import prune
from tests.cases.jobs import pipeline_of
from tests.cases.managers import everything_below, manager_of, state
from tests.distributed.pool import Pool

NOBODY = ProcessIdentity("gone", "", "", 1, "")


SAVE_ID = "0123456789abcdef" * 2


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


# --- what is there


@pytest.mark.parametrize("is_alive", [False, True])
def test_t07_states_and_who_owns_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_alive: bool
) -> None:
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(float(step)))
        manager.pin(1)
    for step in (2, 3):
        for name in ("manifest.json", ".metadata"):
            (tmp_path / f"step-{step}" / name).unlink()
    save3 = next((tmp_path / "step-3").glob("__0_0.*")).name.split(".")[1]
    marker = tmp_path / "step-3" / f".saving-{save3}{'0' * 24}.json"
    owner = ProcessIdentity.current() if is_alive else NOBODY
    marker.write_bytes(owner.encode())
    if not is_alive:
        os.utime(marker, (0, 0))
    states = {info.name: str(info.state) for info in list_directory(tmp_path).checkpoints}
    third = "in progress" if is_alive else "incomplete"
    assert states == {"step-1": "committed", "step-2": "incomplete", "step-3": third}
    assert run("ls", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "committed, pinned" in out and third in out
    with manager_of(tmp_path) as manager:
        assert manager.steps() == [1] and manager.latest() == 1
        assert manager.restore(state()) == 1
    assert run("latest", str(tmp_path)) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path}/step-1\n"
    assert shown.err.splitlines() == [f"note: step-3 is {third}", "note: step-2 is incomplete"]
    before = everything_below(tmp_path)
    assert run("prune", str(tmp_path), "--dry-run") == 0
    assert everything_below(tmp_path) == before
    assert run("prune", str(tmp_path)) == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-1", "step-3"} if is_alive else {"step-1"}


def test_latest_says_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with manager_of(tmp_path) as manager:
        for step in (9, 10, 100):
            manager.save(step, state())
    os.truncate(next((tmp_path / "step-100").glob("__0_0.*")), 10)
    (tmp_path / "step-10" / "manifest.json").write_bytes(b"{}")
    assert run("latest", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path}/step-9\n"
    first, second = shown.err.splitlines()
    assert first.startswith("problem: step-100: __0_0.") and "has 10 bytes" in first
    assert second.startswith("problem: step-10: ")
    assert run("latest", str(tmp_path), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint"]["step"] == 9 and list(report["damaged"]) == ["step-100", "step-10"]
    assert run("latest", str(tmp_path / "step-9")) == 1
    assert "no step was ever committed" in capsys.readouterr().err


def test_prune_leaves_a_run_that_lives(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state())
        report = prune(tmp_path)
        assert report.removed == ()
        assert [kept.path for kept in report.kept] == [f"{tmp_path}/.run.json"]
        manager.save(2, state())
    (tmp_path / ".run.json").write_bytes(NOBODY.encode())
    assert prune(tmp_path).removed == ()
    os.utime(tmp_path / ".run.json", (0, 0))
    assert [gone.why for gone in prune(tmp_path).removed] == ["left by a run that has ended"]


# --- what stays


def test_the_best_by_a_metric(tmp_path: Path) -> None:
    losses = {1: 0.9, 2: 0.3, 3: math.nan, 4: 0.7, 5: 0.2, 6: None, 7: 0.8, 8: -math.inf, 9: 0.5}
    with manager_of(tmp_path, keep_last=1, keep_best=2, metric="loss") as manager:
        for step, loss in losses.items():
            manager.save(step, state(), metrics={} if loss is None else {"loss": loss})
        assert manager.steps() == [2, 5, 9]
    # Another process knows of the metrics by the manifests.
    with manager_of(tmp_path, keep_last=1, keep_best=1, metric="loss", mode="max") as manager:
        manager.save(10, state(), metrics={"loss": 0.1})
        assert manager.steps() == [9, 10]


def test_pins(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep_last=1) as manager:
        manager.save(1, state())
        manager.pin(1)
        manager.pin(1)
        manager.save(2, state())
        manager.save(3, state())
        assert manager.steps() == [1, 3]
        with pytest.raises(CheckpointNotFoundError, match="step-2"):
            manager.pin(2)
        manager.unpin(1)
        manager.unpin(1)
        manager.save(4, state())
        assert manager.steps() == [4]
    (tmp_path / "step-4" / ".pinned").touch()  # by hand
    with manager_of(tmp_path, keep_last=1) as manager:
        manager.save(5, state())
        assert manager.steps() == [4, 5]
        assert manager.restore(state(), 4) == 4


def test_the_only_good_one_stays(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep_last=2) as manager:
        manager.save(1, state())
        manager.save(2, state())
        next((tmp_path / "step-2").glob("__0_0.*")).unlink()
        manager.save(3, state())
        assert manager.steps() == [1, 2, 3]
        manager.save(4, state())
        assert manager.steps() == [3, 4]


def test_a_step_that_was_just_saved_stays_though_newer_ones_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path) as manager:
        for step in (10, 20, 30):
            manager.save(step, state(float(step)))
    with manager_of(tmp_path, keep_last=1) as manager:
        assert manager.restore(state(), 10) == 10
        manager.save(11, state())
        assert manager.steps() == [11, 30]
    assert "step 11 is saved although step 30 is there" in caplog.text


@pytest.mark.parametrize("in_background", [False, True])
def test_removal_is_atomic_to_a_reader(
    tmp_path: Path, in_background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a file of a removed step goes, the step is not there under its name any more."""
    seen: list[str] = []
    real = FileChanges.remove

    def remove(self: FileChanges, path: str) -> None:
        folder = os.path.basename(os.path.dirname(path))
        if folder.startswith(".removed-"):
            seen.append(folder)
            assert not (tmp_path / "step-1").exists()
        real(self, path)

    monkeypatch.setattr(FileChanges, "remove", remove)
    with manager_of(tmp_path, keep_last=1, background_removal=in_background) as manager:
        manager.save(1, state())
        manager.save(2, state())
        manager.wait()
        assert seen and set(tmp_path.iterdir()) == {tmp_path / "step-2", tmp_path / ".run.json"}


def test_a_step_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: FileChanges, path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with manager_of(tmp_path, keep_last=1) as manager:
        manager.save(1, state())
        with monkeypatch.context() as patched:
            patched.setattr(FileChanges, "remove_tree", refuse)
            manager.save(2, state())
        assert manager.steps() == [2]
        assert "could not be deleted" in caplog.text
    prune(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_links(tmp_path: Path) -> None:
    """A step may lie elsewhere; what is removed is the link."""
    elsewhere = tmp_path / "elsewhere"
    root = tmp_path / "run"
    with manager_of(elsewhere) as manager:
        manager.save(1, state(1.0))
    root.mkdir()
    (root / "step-1").symlink_to(elsewhere / "step-1")
    (root / "step-2").symlink_to("step-2")
    (root / "step-3").symlink_to("nowhere")
    (root / "step-4").touch()
    with manager_of(root, keep_last=1) as manager:
        assert manager.steps() == [1] and manager.restore(state()) == 1
        manager.save(5, state())
        assert manager.steps() == [5]
    assert {path.name for path in root.iterdir()} == {"step-2", "step-3", "step-4", "step-5"}
    assert (elsewhere / "step-1" / "manifest.json").exists()


# --- one step, one save


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state(1.0))
        with pytest.raises(CheckpointExistsError, match="step-1 is committed already"):
            manager.save(1, state(2.0))
        found = state()
        assert manager.restore(found) == 1 and found["w"][0] == 1.0
    with manager_of(tmp_path, overwrite="replace") as manager:
        manager.save(1, state(2.0))
        assert manager.restore(found) == 1 and found["w"][0] == 2.0
    with pytest.raises(ValueError, match="a step is an integer from 0 on"):
        manager_of(tmp_path).save(-1, state())


def save_other_steps(root: Path) -> None:
    with manager_of(root) as manager:
        manager.save(1 + dist.get_rank(), state())


def test_ranks_that_do_not_save_the_same_step(ranks: Pool, tmp_path: Path) -> None:
    failures = ranks(2).fail(save_other_steps, tmp_path)
    assert all(f.is_a("DisagreementError") and "[1, 2]" in f.message for f in failures)
    assert everything_below(tmp_path) == []


def save_with_other_settings(root: Path) -> None:
    with manager_of(root, keep_last=1 + dist.get_rank()) as manager:
        manager.save(1, state())


def test_ranks_that_were_told_different_things(ranks: Pool, tmp_path: Path) -> None:
    failures = ranks(2).fail(save_with_other_settings, tmp_path)
    assert all(f.is_a("DisagreementError") and '"keep_last":2' in f.message for f in failures)


def train_in_groups(root: Path) -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    which = dist.get_rank() % 2
    own = root / str(which)
    with CheckpointManager(own, pipeline_of(), process_group=groups[which], keep_last=1) as manager:
        for step in (1, 2 + which):
            manager.save(step, {f"of{dist.get_rank()}": torch.full((3,), float(step))})
        found = {f"of{dist.get_rank()}": torch.zeros(3)}
        return manager.steps(), manager.restore(found), found[f"of{dist.get_rank()}"].tolist()


def test_groups_of_ranks_have_runs_of_their_own(ranks: Pool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    results = ranks(4).run(train_in_groups, tmp_path)
    assert results == [([2], 2, [2.0] * 3), ([3], 3, [3.0] * 3)] * 2


@pytest.mark.parametrize("uri", [False, True])
def test_roots(tmp_path: Path, uri: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = f"file://{tmp_path}/a%20b/" if uri else "a b/"
    with manager_of(root, keep_last=1) as manager:
        manager.save(1, state())
        manager.save(2, state())
        assert manager.root == f"{tmp_path}/a b" and manager.path(2) == f"{tmp_path}/a b/step-2"
        assert manager.steps() == [2]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        manager_of(tmp_path / "file").save(1, state())
    assert manager_of(tmp_path / "file").latest() is None
