import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.errors import CheckpointNotFoundError, ConcurrentSaveError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.tools.prune import PruneReport, prune
from dcp_pipeline.tools.verify import verify

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

DEAD = "0badcafe" + "0" * 24


def save(path: Path, value: float = 1.0) -> None:
    dcp_pipeline.save({"w": torch.full((100,), value)}, checkpoint_id=path)


def gone() -> bytes:
    """The identity of a process of this host that has ended."""
    code = (
        "import sys; from dcp_pipeline.core.liveness import ProcessIdentity as P;"
        "sys.stdout.buffer.write(P.current().encode())"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def dead() -> bytes:
    return gone()


def elsewhere() -> bytes:
    return ProcessIdentity("another-host", "boot", "", 1, "1").encode()


def begin(path: Path, owner: bytes | None, save_id: str = DEAD) -> None:
    """What a save that was killed while it wrote has left; ``None`` for no marker."""
    path.mkdir(parents=True, exist_ok=True)
    if owner is not None:
        (path / f".saving-{save_id}.json").write_bytes(owner)
    for name in (f"__0_0.{save_id[:8]}.distcp", f"__1.{save_id[:8]}.sums"):
        (path / name).write_bytes(b"half")


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)


def tree(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def names(report: PruneReport) -> set[str]:
    return {os.path.relpath(leftover.path, report.path) for leftover in report.removed}


def kept(report: PruneReport) -> dict[str, str]:
    return {os.path.relpath(one.path, report.path): one.why for one in report.kept}


def test_t07_a_root_with_complete_and_incomplete_steps(tmp_path: Path, dead: bytes) -> None:
    save(tmp_path / "step-1")
    begin(tmp_path / "step-2", None)
    begin(tmp_path / "step-3", dead)
    begin(tmp_path / "step-4", ProcessIdentity.current().encode(), "1" * 32)
    before = tree(tmp_path)
    wanted = {
        "step-2", "step-2/__0_0.0badcafe.distcp", "step-2/__1.0badcafe.sums",
        "step-3", "step-3/__0_0.0badcafe.distcp", "step-3/__1.0badcafe.sums",
        f"step-3/.saving-{DEAD}.json",
    }  # fmt: skip
    report = prune(tmp_path, dry_run=True)
    assert report.is_dry_run and names(report) == wanted
    assert report.nbytes == 16 + len(dead)
    assert tree(tmp_path) == before
    report = prune(tmp_path)
    assert names(report) == wanted
    assert tree(tmp_path) == before - wanted
    (why,) = kept(report).values()
    assert f"a save of process {os.getpid()} on " in why
    assert verify(tmp_path / "step-1").is_well
    assert prune(tmp_path).removed == ()


def test_leftovers_beside_a_committed_checkpoint(tmp_path: Path, dead: bytes) -> None:
    save(tmp_path)
    good = tree(tmp_path)
    begin(tmp_path, dead)
    (tmp_path / f".saving-{'6' * 32}.json").write_bytes(b"")  # the power was lost
    begun = [tmp_path / f".saving-{digit * 32}.json.01234567.tmp" for digit in "345"]
    for path, content in zip(begun, (dead, b"", b""), strict=True):
        path.write_bytes(content)
    age(begun[1], 100)
    (tmp_path / ".committing.lock").symlink_to(dead.decode())
    (tmp_path / ".manifest.json.01234567.tmp").write_bytes(b"half")
    (tmp_path / ".committing.lock.01234567.tmp").symlink_to(dead.decode())
    mine = {"notes.txt", "__0_0.distcp", ".other.01234567.tmp", "model.safetensors", "folder"}
    for name in mine - {"folder"}:
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    report = prune(tmp_path)
    assert len(report.removed) == 9
    assert tree(tmp_path) == good | mine | {begun[2].name}
    assert verify(tmp_path).is_well


@pytest.mark.parametrize("seconds", [0, 10_000])
def test_a_save_of_another_host_is_dead_once_it_is_stale(tmp_path: Path, seconds: int) -> None:
    begin(tmp_path / "step-1", elsewhere())
    age(tmp_path / "step-1" / f".saving-{DEAD}.json", seconds)
    report = prune(tmp_path)
    if seconds:
        assert tree(tmp_path) == set()
    else:
        assert report.removed == ()
        assert "process 1 on another-host is under way" in next(iter(kept(report).values()))


def test_a_marker_may_ask_for_more_patience(tmp_path: Path) -> None:
    """Its config may renew it more seldom than whoever prunes expects."""
    owner = ProcessIdentity("another-host", "boot", "", 1, "1").encode(stale_after=20_000.0)
    begin(tmp_path / "step-1", owner)
    age(tmp_path / "step-1" / f".saving-{DEAD}.json", 10_000)
    assert prune(tmp_path).removed == ()
    age(tmp_path / "step-1" / f".saving-{DEAD}.json", 30_000)
    assert len(prune(tmp_path).removed) == 4


def test_a_live_lock_is_left_alone(tmp_path: Path, dead: bytes) -> None:
    save(tmp_path)
    begin(tmp_path, dead)
    (tmp_path / ".committing.lock").symlink_to(ProcessIdentity.current().encode().decode())
    (tmp_path / ".manifest.json.01234567.tmp").write_bytes(b"half")
    assert len(prune(tmp_path).removed) == 3
    assert {".committing.lock", ".manifest.json.01234567.tmp"} <= tree(tmp_path)


def test_what_the_manager_took_out_of_sight(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    root = tmp_path / "root"
    save(root / ".removed-step-10-0123abcd")
    (root / ".removed-step-10-0123abcd" / "link").symlink_to(outside)
    (root / ".removed-step-11-0123abcd").symlink_to(outside)
    (root / ".removed-mine").mkdir()
    report = prune(root)
    assert names(report) == {".removed-step-10-0123abcd"}
    assert report.nbytes > 400
    assert tree(root) == {".removed-step-11-0123abcd", ".removed-mine"}
    assert (outside / "precious").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    begin(tmp_path / "elsewhere" / "step-1", None)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "step-1").symlink_to(tmp_path / "elsewhere" / "step-1")
    before = tree(tmp_path)
    assert prune(tmp_path / "root").removed == ()
    assert tree(tmp_path) == before


def test_what_may_be_needed_is_kept(tmp_path: Path, dead: bytes) -> None:
    save(tmp_path / "step-1")
    manifest = tmp_path / "step-1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    save(tmp_path / "step-2")
    (tmp_path / "step-2" / "manifest.json").unlink()  # .metadata names our files all the same
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "step-3")
    (tmp_path / "step-3" / ".metadata").unlink()  # or is not written yet
    begin(tmp_path / "step-4", dead)
    (tmp_path / "step-4" / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "export").mkdir()
    before = tree(tmp_path)
    report = prune(tmp_path)
    assert tree(tmp_path) == before - {
        f"step-4/{name}"
        for name in (f".saving-{DEAD}.json", "__0_0.0badcafe.distcp", "__1.0badcafe.sums")
    }
    reasons = kept(report)
    assert sorted(reasons) == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    assert "manifest.json is lost" in reasons["step-2"]
    assert "it cannot be told what the checkpoint needs" in reasons["step-1"]
    assert "data of plain DCP without .metadata" in reasons["step-3"]
    assert "notes.txt is not this package's" in reasons["step-4"]
    assert "made just now" in reasons["step-5"]
    age(tmp_path / "step-5", 10_000)
    assert names(prune(tmp_path)) == {"step-5"}


def test_leftovers_of_ours_in_a_checkpoint_of_plain_dcp(tmp_path: Path, dead: bytes) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    good = tree(tmp_path)
    begin(tmp_path, dead)
    assert len(prune(tmp_path).removed) == 3
    assert tree(tmp_path) == good
    save(tmp_path / "ours")
    ours = tree(tmp_path / "ours")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "ours")
    begin(tmp_path / "ours", dead)
    assert len(prune(tmp_path).removed) == 3
    assert tree(tmp_path / "ours") == ours | {"__0_0.distcp"}


def test_what_cannot_be_removed_is_said(tmp_path: Path) -> None:
    class Refusing(FileChanges):
        def remove(self, path: str) -> None:
            raise PermissionError(13, "Permission denied", path)

    begin(tmp_path / "step-1", None)
    report = prune(tmp_path, changes=Refusing())
    assert report.removed == ()
    assert len(report.failed) == 2 and "Permission denied" in report.failed[0]
    with pytest.raises(CheckpointNotFoundError):
        prune(tmp_path / "nope")


def test_a_save_that_was_taken_for_dead_gives_up(tmp_path: Path) -> None:
    """Its files are gone, so that committing them would destroy the checkpoint."""

    class Slow(FileChanges):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            for marker in tmp_path.glob(".saving-*"):
                if len(list(tmp_path.glob("*.sums"))) == 2 and Slow.armed:
                    Slow.armed = False
                    marker.write_bytes(elsewhere())
                    age(marker, 10_000)
                    prune(tmp_path)

        armed = True

    save(tmp_path, 1.0)
    old = tree(tmp_path)
    with Pipeline() as pipeline:
        pipeline._parts.storage.changes = Slow()
        with pytest.raises(ConcurrentSaveError, match="took this save for dead"):
            pipeline.save({"w": torch.full((100,), 2.0)}, tmp_path)
    assert tree(tmp_path) == old
    assert verify(tmp_path).is_well


def test_a_directory_that_goes_while_a_save_begins(tmp_path: Path) -> None:
    class Pruned(FileChanges):
        def create(self, path: str, flags: int = 0) -> int:
            if not done:
                done.append(os.rmdir(tmp_path / "step-1"))
            return super().create(path, flags)

    done: list[None] = []
    with Pipeline() as pipeline:
        pipeline._parts.storage.changes = Pruned()
        pipeline.save({"w": torch.ones(3)}, tmp_path / "step-1")
    assert done and verify(tmp_path / "step-1").is_well


PRUNE_AGAIN_AND_AGAIN = """
import sys
from pathlib import Path
from dcp_pipeline.tools.prune import prune

while not Path(sys.argv[2]).exists():
    report = prune(sys.argv[1])
    assert report.failed == (), report.failed
"""


def test_beside_saves_and_beside_one_another(tmp_path: Path) -> None:
    """Saves into one directory and into new ones, while two processes prune as fast as they can."""
    root, stop, steps = tmp_path / "root", tmp_path / "stop", 8
    root.mkdir()
    command = [sys.executable, "-c", PRUNE_AGAIN_AND_AGAIN, str(root), str(stop)]
    others = [subprocess.Popen(command) for _ in range(2)]
    try:
        for step in range(steps):
            begin(tmp_path / "begun", None)
            os.rename(tmp_path / "begun", root / "step-1000")
            save(root / "same", float(step))
            save(root / f"step-{step}", float(step))
            while (root / "step-1000").exists() and others[0].poll() is None:
                time.sleep(0.001)
    finally:
        stop.touch()
    for other in others:
        assert other.wait(60) == 0
    prune(root)
    assert sorted(os.listdir(root)) == sorted(["same", *(f"step-{i}" for i in range(steps))])
    assert all(verify(folder).is_well for folder in root.iterdir())
    assert dcp_pipeline.load_keys(root / "same")["w"][0] == steps - 1


def test_beside_another_prune_in_threads(tmp_path: Path) -> None:
    for step in range(30):
        begin(tmp_path / f"step-{step}", None)
        save(tmp_path / f".removed-step-{step}-0123abcd")
    reports: list[PruneReport] = []
    threads = [threading.Thread(target=lambda: reports.append(prune(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.failed for report in reports] == [(), (), ()]
    assert tree(tmp_path) == set()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path / "step-2", None)
    begin(tmp_path / "step-3", elsewhere(), "2" * 32)
    assert run("prune", str(tmp_path), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "3 leftovers would be removed, 8 B" in shown
    assert "kept" in shown
    assert run("prune", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert sorted(report) == ["failed", "is_dry_run", "kept", "nbytes", "path", "removed"]
    assert sorted(report["removed"][0]) == ["nbytes", "path", "why"]
    assert sorted(os.listdir(tmp_path)) == ["step-3"]
    assert run("prune", str(tmp_path)) == 0
    assert "0 leftovers removed, 0 B" in capsys.readouterr().out
    assert run("prune", str(tmp_path / "nope")) == 1
    assert run("prune", "s3://bucket/x") == 2
    assert run("prune") == 2


def test_what_a_replaced_checkpoint_of_plain_dcp_needs(tmp_path: Path) -> None:
    """A save that was killed between its two steps: both are there, and both stay."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "plain")
    old = {name: (tmp_path / "plain" / name).read_bytes() for name in ("__0_0.distcp", ".metadata")}
    save(tmp_path / "plain")
    save(tmp_path / "ours")
    before = {name.name: name.read_bytes() for name in (tmp_path / "ours").iterdir()}
    save(tmp_path / "ours")
    for name, data in old.items():
        (tmp_path / "plain" / name).write_bytes(data)
    for name in before.keys() - {"manifest.json"}:
        (tmp_path / "ours" / name).write_bytes(before[name])
    both = tree(tmp_path)
    report = prune(tmp_path)
    assert report.removed == () and tree(tmp_path) == both
    assert sorted(kept(report)) == ["ours/.metadata", "plain/.metadata", "plain/__0_0.distcp"]
    assert verify(tmp_path / "ours").is_well


@pytest.mark.parametrize("seconds", [0, 100])
def test_a_marker_that_is_being_written(tmp_path: Path, seconds: int) -> None:
    """Its directory is empty but for it, and would go with it under the save that begins."""
    (tmp_path / "step-1").mkdir()
    begun = tmp_path / "step-1" / f".saving-{'3' * 32}.json.01234567.tmp"
    begun.write_bytes(b"")
    age(begun, seconds)
    assert bool(prune(tmp_path).removed) == bool(seconds)
    assert (tmp_path / "step-1").exists() == (not seconds)
