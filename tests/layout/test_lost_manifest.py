"""``manifest.json`` of a checkpoint of ours is lost: damage, never a checkpoint of plain DCP."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline import CheckpointManager, FileSystemWriter
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.errors import CheckpointExistsError, CorruptCheckpointError, MissingFileError
from dcp_pipeline.layout.dcp import DcpLayout
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.tools.inspect import inspect
from dcp_pipeline.tools.latest import find_latest
from dcp_pipeline.tools.listing import list_directory
from dcp_pipeline.tools.prune import prune
from dcp_pipeline.tools.verify import verify
from tests.corruption.forge import data_file
from tests.equal import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((50, 8), value), "settings": {"lr": value, "names": ("a", 1)}}


def save(path: Path) -> None:
    dcp_pipeline.save(state(), checkpoint_id=path)


def save_by_dcp(path: Path) -> None:
    dcp.save(state(), storage_writer=FileSystemWriter(str(path)), no_dist=True)


@pytest.fixture(params=[save, save_by_dcp])
def lost(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint without its manifest, a byte of whose tensor has changed since."""
    path = tmp_path / "step-2"
    request.param(path)
    (path / "manifest.json").unlink()
    data = bytearray(data_file(path).read_bytes())
    data[data.index(torch.full((50, 8), 1.0).numpy().tobytes()) + 2] ^= 1
    data_file(path).write_bytes(data)
    return path


def load(path: Path) -> None:
    dcp_pipeline.load(state(-1.0), checkpoint_id=path)


def dcp_load(path: Path) -> None:
    dcp.load(state(-1.0), storage_reader=dcp_pipeline.FileSystemReader(str(path)), no_dist=True)


@pytest.mark.parametrize("opens", [load, dcp_load, dcp_pipeline.load_keys, inspect])
def test_it_is_refused(lost: Path, opens: Callable[[Path], Any]) -> None:
    with pytest.raises((CorruptCheckpointError, dcp.CheckpointException)) as caught:
        opens(lost)
    for said in ("manifest.json is missing", str(lost), "on_foreign_overwrite=metadata"):
        assert said in str(caught.value)


def test_a_restore_goes_to_the_step_before(lost: Path) -> None:
    with CheckpointManager(lost.parent) as manager:
        save(lost.parent / "step-1")
        found = state(-1.0)
        assert manager.restore(found) == 1
    assert_same(found, state())


def test_the_tools_call_it_damaged(lost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(lost)
    (problem,) = [one for one in report.problems if one.file == "manifest.json"]
    assert "missing" in problem.found and report.kind == "dcp_pipeline"
    assert not any("prune removes" in note for note in report.notes)
    (info,) = list_directory(lost.parent).checkpoints
    assert info.state == "damaged" and "manifest.json is missing" in info.problem
    assert find_latest(lost.parent).checkpoint is None
    for command, path in (("verify", lost), ("inspect", lost), ("latest", lost.parent)):
        with pytest.raises(SystemExit) as caught:
            main([command, str(path)])
        assert caught.value.code == 1
        said = capsys.readouterr()
        assert "missing" in said.out + said.err


def test_it_opens_unverified_on_purpose(lost: Path) -> None:
    found = state(-1.0)
    config = {"layout": {"kind": "dcp", "on_foreign_overwrite": "metadata"}}
    report = dcp_pipeline.load(found, checkpoint_id=lost, config=config)
    assert not report.is_verified
    assert int((found["w"] != 1.0).sum()) == 1


def test_plain_dcp_opens_it_as_ever(lost: Path) -> None:
    found = state(-1.0)
    dcp.load(found, checkpoint_id=lost, no_dist=True)
    assert int((found["w"] != 1.0).sum()) == 1


def test_prune_keeps_all_of_it_and_says_so(lost: Path) -> None:
    before = sorted(lost.iterdir())
    report = prune(lost.parent)
    assert report.removed == () and sorted(lost.iterdir()) == before
    assert any("manifest.json is lost" in kept.why for kept in report.kept)


def test_a_save_replaces_it(lost: Path) -> None:
    old = set(lost.iterdir())
    with pytest.raises(CheckpointExistsError):
        dcp_pipeline.save(state(2.0), checkpoint_id=lost, config={"overwrite": "error"})
    assert set(lost.iterdir()) == old
    dcp_pipeline.save(state(2.0), checkpoint_id=lost)
    assert verify(lost).is_well
    assert not (set(lost.iterdir()) & old) - {lost / ".metadata"}
    found = state(-1.0)
    dcp_pipeline.load(found, checkpoint_id=lost)
    assert_same(found, state(2.0))


def test_what_plain_dcp_has_saved_is_none_of_this(tmp_path: Path) -> None:
    save(tmp_path)
    dcp.save(state(3.0), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "manifest.json").unlink()
    found = state(-1.0)
    assert not dcp_pipeline.load(found, checkpoint_id=tmp_path).is_verified
    assert_same(found, state(3.0))
    assert verify(tmp_path).is_well


def test_a_commit_between_two_looks_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    directory = FileSystemStorage().open(str(tmp_path))
    read, looks = directory.read, []

    def late(name: str, *args: Any) -> bytes:
        looks.append(name)
        if looks == ["manifest.json"]:
            raise MissingFileError("not yet")
        return read(name, *args)

    monkeypatch.setattr(directory, "read", late)
    assert DcpLayout().open(directory).save_id
