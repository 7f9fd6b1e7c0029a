import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_pipeline.core.errors import CheckpointNotFoundError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools import listing
from dcp_pipeline.tools.listing import CheckpointInfo, list_directory
from dcp_pipeline.tools.opening import State

SAVE_ID = "0123456789abcdef" * 2


def save(path: Path) -> None:
    with Pipeline.from_recipe("tiny_decoder") as pipeline:
        pipeline.save({"w": torch.ones(4), "step": 3}, path)


def data_of(path: Path) -> Path:
    return next(path.glob("__0_0.*.distcp"))


def mark(path: Path, owner: ProcessIdentity) -> Path:
    path.mkdir(exist_ok=True)
    marker = path / f".saving-{SAVE_ID}.json"
    marker.write_bytes(owner.encode())
    return marker


def by_name(root: Path) -> dict[str, CheckpointInfo]:
    return {info.name: info for info in list_directory(root).checkpoints}


def _process_that_has_ended() -> ProcessIdentity:
    child = subprocess.Popen(["sleep", "0"])
    child.wait()
    here = ProcessIdentity.current()
    return ProcessIdentity(here.host, here.boot, here.namespace, child.pid, "1")


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("step-10", "step-9", "final", "step-100"):
        save(tmp_path / name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    listed = list_directory(tmp_path)
    assert [info.name for info in listed.checkpoints] == ["step-9", "step-10", "step-100", "final"]
    assert [info.step for info in listed.checkpoints] == [9, 10, 100, None]
    assert listed.files is None
    first = listed.checkpoints[0]
    assert (first.state, first.keys, first.problem) == (State.COMMITTED, 2, "")
    assert first.nbytes == sum(p.stat().st_size for p in (tmp_path / "step-9").iterdir())
    assert 0 <= first.age_seconds < 60
    assert first.save_id is not None and len(first.save_id) == 32


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_states(tmp_path: Path) -> None:
    save(tmp_path / "committed")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "foreign")
    save(tmp_path / "overwritten")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "overwritten")
    mark(tmp_path / "in_progress", ProcessIdentity.current())
    mark(tmp_path / "dead", _process_that_has_ended())
    (tmp_path / "dead" / "__0_0.01234567.distcp").write_bytes(b"x")
    save(tmp_path / "damaged")
    (tmp_path / "damaged" / "manifest.json").write_bytes(b"{}")
    save(tmp_path / "cut off")
    cut = data_of(tmp_path / "cut off")
    size = cut.stat().st_size
    os.truncate(cut, 5)
    save(tmp_path / "lost sums")
    sums = next((tmp_path / "lost sums").glob("*.sums"))
    sums.unlink()
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "foreign, lost")
    (tmp_path / "foreign, lost" / "__0_0.distcp").unlink()
    found = by_name(tmp_path)
    assert {name: info.state for name, info in found.items()} == {
        "committed": State.COMMITTED,
        "foreign": State.FOREIGN,
        "overwritten": State.FOREIGN,
        "in_progress": State.IN_PROGRESS,
        "dead": State.INCOMPLETE,
        "damaged": State.DAMAGED,
        "cut off": State.DAMAGED,
        "lost sums": State.DAMAGED,
        "foreign, lost": State.DAMAGED,
    }
    assert "plain DCP has saved over" in found["overwritten"].problem
    assert "manifest.json is not a dcp_pipeline.checkpoint record" in found["damaged"].problem
    assert found["cut off"].problem == f"{cut.name} has 5 bytes, {size} were written"
    assert found["lost sums"].problem == f"{sums.name} is missing"
    assert found["foreign, lost"].problem == "__0_0.distcp is missing"
    # What its record says is shown all the same.
    assert (found["cut off"].keys, len(found["cut off"].save_id or "")) == (2, 32)
    assert found["foreign"].keys == 1
    assert found["in_progress"].keys is found["dead"].keys is None


def test_a_marker_that_was_not_renewed_is_dead(tmp_path: Path) -> None:
    here = ProcessIdentity.current()
    elsewhere = ProcessIdentity("another host", "", "", here.pid, "")
    marker = mark(tmp_path / "remote", elsewhere)
    (tmp_path / "remote" / "__0_0.01234567.distcp").write_bytes(b"x")
    assert by_name(tmp_path)["remote"].state is State.IN_PROGRESS
    old = time.time() - 601
    os.utime(marker, (old, old))
    assert by_name(tmp_path)["remote"].state is State.INCOMPLETE


def test_a_checkpoint_that_is_being_replaced(tmp_path: Path) -> None:
    save(tmp_path / "one")
    mark(tmp_path / "one", ProcessIdentity.current())
    info = by_name(tmp_path)["one"]
    assert (info.state, info.is_being_saved) == (State.COMMITTED, True)


def test_files_of_before_that_go_while_one_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save replaces the checkpoint between the look at its record and the look at its files."""
    save(tmp_path / "one")
    before = by_name(tmp_path)["one"].save_id
    real, looks = listing.files_of, list[int]()

    def late(*arguments: Any) -> Any:
        if not looks:
            save(tmp_path / "one")
        looks.append(len(looks))
        return real(*arguments)

    monkeypatch.setattr(listing, "files_of", late)
    info = by_name(tmp_path)["one"]
    assert (info.state, info.problem, looks) == (State.COMMITTED, "", [0, 1])
    assert info.save_id != before


def test_one_checkpoint_gives_its_files(tmp_path: Path) -> None:
    save(tmp_path / "step-4")
    listed = list_directory(tmp_path / "step-4")
    (info,) = listed.checkpoints
    assert (info.name, info.step, info.state) == (".", 4, State.COMMITTED)
    assert listed.files is not None
    assert [file.role for file in listed.files] == ["manifest", "metadata", "data", "sums"]
    os.truncate(data_of(tmp_path / "step-4"), 5)
    listed = list_directory(tmp_path / "step-4")
    assert [info.state for info in listed.checkpoints] == [State.DAMAGED]
    assert [file.is_well for file in listed.files or ()] == [True, True, False, True]


def test_a_directory_that_is_one_and_holds_others(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path / "step-2")
    listed = list_directory(tmp_path)
    assert [info.name for info in listed.checkpoints] == [".", "step-2"]
    assert listed.files is None


def test_nothing(tmp_path: Path) -> None:
    assert list_directory(tmp_path).checkpoints == ()
    with pytest.raises(CheckpointNotFoundError, match="is not there"):
        list_directory(tmp_path / "nope")
