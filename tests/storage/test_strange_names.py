"""Under the names of markers, locks and records may lie anything: nothing hangs or hides others."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcp_pipeline
from dcp_pipeline.core.errors import (
    CheckpointError,
    ConcurrentSaveError,
    CorruptCheckpointError,
    StorageError,
)
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.storage import commit_lock
from dcp_pipeline.tools.listing import list_directory
from dcp_pipeline.tools.prune import prune
from dcp_pipeline.tools.verify import verify, verify_all
from tests.memory import begin_peak, needs_peak, peak

MARKER = f".saving-{'a' * 32}.json"
LOCK = ".committing.lock"
NAMES = [MARKER, f"{MARKER}.01234567.tmp", LOCK, ".manifest.json.01234567.tmp"]


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def stretched(path: Path) -> None:
    path.touch()
    os.truncate(path, 2 << 30)


def odd(**fields: object) -> Callable[[Path], object]:
    identity = json.loads(ProcessIdentity.current().encode()) | {"host": "elsewhere"}
    return text(json.dumps(identity | fields))


STRANGE: dict[str, Callable[[Path], object]] = {
    "folder": os.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "empty": text(""),
    "deep": text("[" * 200_000),
    "stretched": stretched,
    "pid is infinite": odd(pid=float("inf")),
    "pid is huge": odd(pid=1 << 80),
    "pid is of a group": odd(pid=-5),
    "pid is text": odd(pid="x"),
    "patience is nan": odd(stale_after=float("nan")),
    "replaces others": odd(replaces=["../../precious", 7]),
}


def save(path: Path, value: float = 1.0) -> None:
    dcp_pipeline.save({"w": torch.full((100,), value)}, checkpoint_id=path)


def age(path: Path, seconds: float = 10_000) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_lock, "_TIMEOUT", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", STRANGE)
def test_whatever_lies_there(tmp_path: Path, kind: str, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    root = tmp_path / "root"
    for step in (1, 2):
        save(root / f"step-{step}")
    STRANGE[kind](root / "step-1" / name)
    started = time.perf_counter()
    assert {info.name: str(info.state) for info in list_directory(root).checkpoints} == {
        "step-1": "committed",
        "step-2": "committed",
    }
    assert all(report.is_well for report in verify_all(root))
    report = prune(root)
    assert report.failed == ()
    is_there = os.path.lexists(root / "step-1" / name)
    assert is_there == any(kept.path.endswith(name) for kept in report.kept) or "tmp" in name
    try:
        save(root / "step-1", 2.0)
    except (ConcurrentSaveError, StorageError) as error:
        assert name == LOCK and str(root / "step-1" / LOCK) in str(error)
    assert time.perf_counter() - started < 10
    assert verify(root / "step-1").is_well
    assert precious.read_text() == "precious"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", [kind for kind in STRANGE if kind != "folder"])
def test_a_lock_that_says_nothing_is_said_to_be_so_and_broken_once_stale(
    tmp_path: Path, kind: str
) -> None:
    save(tmp_path)
    lock = tmp_path / LOCK
    STRANGE[kind](lock)
    (kept,) = prune(tmp_path).kept
    assert kept.path == str(lock)
    if kind not in ("patience is nan", "replaces others"):
        assert "does not say whose it is" in kept.why and "once it is 600 s old" in kept.why
    with pytest.raises(ConcurrentSaveError) as caught:
        save(tmp_path, 2.0)
    assert kept.why.split(",")[0] in str(caught.value)
    age(lock)
    if kind == "pipe":
        assert [one.path for one in prune(tmp_path).removed] == [str(lock)]
    save(tmp_path, 2.0)
    assert not os.path.lexists(lock) and verify(tmp_path).is_well


def test_a_folder_as_lock_is_left_to_whoever_made_it(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / LOCK).mkdir()
    age(tmp_path / LOCK)
    report = prune(tmp_path)
    assert report.failed == () and "remove it by hand" in report.kept[0].why
    started = time.perf_counter()
    with pytest.raises(StorageError, match="is a directory"):
        save(tmp_path, 2.0)
    assert time.perf_counter() - started < 5
    assert (tmp_path / LOCK).is_dir() and verify(tmp_path).is_well


def test_a_folder_in_the_way_keeps_no_leftovers(tmp_path: Path) -> None:
    """What a save cannot remove is no reason to leave what it can."""
    save(tmp_path)
    (tmp_path / MARKER).mkdir()
    (tmp_path / "__0_0.0badcafe.distcp").write_bytes(b"half")
    save(tmp_path, 2.0)
    assert not (tmp_path / "__0_0.0badcafe.distcp").exists()


@needs_peak
@pytest.mark.parametrize("stretch", [3 << 30, 1 << 40])
@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "*.sums"])
@pytest.mark.parametrize("kind", ["ours", "plain"])
def test_a_stretched_record_is_refused_before_it_is_read(
    tmp_path: Path, kind: str, name: str, stretch: int
) -> None:
    save(tmp_path)
    if kind == "plain":
        if name != ".metadata":
            pytest.skip("plain DCP has no such file")
        (tmp_path / "manifest.json").unlink()
    (file,) = tmp_path.glob(name)
    os.truncate(file, stretch)
    before = begin_peak()
    with pytest.raises(CheckpointError, match=re.escape(file.name)):
        dcp_pipeline.load({"w": torch.zeros(100)}, checkpoint_id=tmp_path)
    assert not verify(tmp_path).is_well
    assert peak() - before < 200e6


def test_an_honest_record_of_any_size_is_read(tmp_path: Path) -> None:
    """Blocks that were never written are no sign of damage while they are few."""
    (tmp_path / "big").write_bytes(os.urandom(5 << 20))
    directory = dcp_pipeline.storage.filesystem.FileSystemStorage().open(str(tmp_path))
    assert len(directory.read("big")) == 5 << 20
    os.truncate(tmp_path / "big", 6 << 20)
    assert len(directory.read("big")) == 6 << 20
    os.truncate(tmp_path / "big", 60 << 20)
    with pytest.raises(CorruptCheckpointError, match="stretched"):
        directory.read("big")
    assert len(directory.read("big", 0, 1000)) == 1000


@pytest.mark.parametrize("act", [save, verify, list_directory, prune])
def test_a_name_that_is_too_long(tmp_path: Path, act: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError) as caught:
        act(tmp_path / ("x" * 300))
    assert str(tmp_path) in str(caught.value)
