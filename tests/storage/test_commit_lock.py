"""The lock of a commit: dead ones are broken, living ones never are."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dcp_pipeline.core.errors import ConcurrentSaveError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.storage import commit_lock
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.commit_lock import LOCK, CommitLock


def write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


def lock_in(path: Path, changes: FileChanges | None = None, stale_after: float = 600) -> CommitLock:
    return CommitLock(changes or FileChanges(), str(path), stale_after, write)


def dead_owner() -> str:
    """The text of a lock whose owner has ended."""
    code = "from dcp_pipeline.core.liveness import ProcessIdentity as Me;"
    code += "print(Me.current().encode().decode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def living_owner() -> str:
    return ProcessIdentity.current().encode(nonce="another").decode()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_lock, "_TIMEOUT", 0.2)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_it_is_there_while_held(tmp_path: Path) -> None:
    with lock_in(tmp_path).held():
        assert names(tmp_path) == [LOCK]
        assert json.loads(os.readlink(tmp_path / LOCK))["pid"] == os.getpid()
    assert names(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_a_living_one_keeps_others_out(tmp_path: Path) -> None:
    with (
        lock_in(tmp_path).held(),
        pytest.raises(ConcurrentSaveError, match="is held"),
        lock_in(tmp_path).held(),
    ):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("make", [os.symlink, lambda text, path: write(path, text.encode())])
def test_a_dead_one_is_broken(tmp_path: Path, make: Callable[[str, Path], None]) -> None:
    make(dead_owner(), tmp_path / LOCK)
    with lock_in(tmp_path).held():
        assert json.loads(os.readlink(tmp_path / LOCK))["pid"] == os.getpid()
    assert names(tmp_path) == []


def test_a_stale_one_of_another_host_is_broken(tmp_path: Path) -> None:
    identity = json.loads(living_owner()) | {"host": "elsewhere"}
    os.symlink(json.dumps(identity), tmp_path / LOCK)
    with lock_in(tmp_path, stale_after=0.0).held():
        pass
    assert names(tmp_path) == []


class NoLinks(FileChanges):
    def symlink(self, text: str, path: str) -> None:
        raise OSError(errno.EPERM, "no links here")


@pytest.mark.usefixtures("impatient")
def test_a_file_where_there_are_no_links(tmp_path: Path) -> None:
    with lock_in(tmp_path, NoLinks()).held():
        assert (tmp_path / LOCK).is_file() and not (tmp_path / LOCK).is_symlink()
        with pytest.raises(ConcurrentSaveError), lock_in(tmp_path).held():
            pass
    assert names(tmp_path) == []


class Overtaken(FileChanges):
    """Another process breaks the dead lock and takes it, just before this one breaks it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def replace(self, source: str, target: str) -> None:
        if source.endswith(LOCK):
            os.unlink(source)
            os.symlink(self.text, source)
        super().replace(source, target)


@pytest.mark.usefixtures("impatient")
def test_one_that_was_taken_meanwhile_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    os.symlink(dead_owner(), tmp_path / LOCK)
    owner = living_owner()
    with pytest.raises(ConcurrentSaveError), lock_in(tmp_path, Overtaken(owner)).held():
        pass
    assert names(tmp_path) == [LOCK] and os.readlink(tmp_path / LOCK) == owner


@pytest.mark.usefixtures("impatient")
def test_only_one_breaks_at_a_time(tmp_path: Path) -> None:
    os.symlink(dead_owner(), tmp_path / LOCK)
    breaker = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(breaker, fcntl.LOCK_EX)
    with pytest.raises(ConcurrentSaveError), lock_in(tmp_path).held():
        pass
    os.close(breaker)
    with lock_in(tmp_path).held():
        pass
    assert names(tmp_path) == []


def test_an_owner_that_lost_it_finds_out_and_leaves_the_other_one(tmp_path: Path) -> None:
    lock = lock_in(tmp_path)
    with lock.held():
        lock.check()
        os.unlink(tmp_path / LOCK)
        with pytest.raises(ConcurrentSaveError, match="was taken"):
            lock.check()
        os.symlink(living_owner(), tmp_path / LOCK)
        with pytest.raises(ConcurrentSaveError, match="was taken"):
            lock.check()
    assert os.readlink(tmp_path / LOCK) == living_owner()


class Unremovable(FileChanges):
    def remove(self, path: str) -> None:
        raise OSError(errno.EIO, "it stays")


def test_one_that_cannot_be_removed_does_not_undo_the_work_and_is_broken_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_in(tmp_path, Unremovable()).held():
        pass
    assert "could not be removed" in caplog.text and names(tmp_path) == [LOCK]
    with lock_in(tmp_path).held():
        pass
    assert names(tmp_path) == []
