"""A manager whose saves run in the background: T06, T11, T21."""

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.events import CheckpointEvent
from dcp_pipeline.storage.changes import FileChanges
from tests.cases.jobs import pipeline_of, state_with, values_of
from tests.distributed.pool import Pool
from tests.marks import slow
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
KINDS = ["thread", slow("process")]

RESUME = """
import sys, torch
from dcp_pipeline.manager import CheckpointManager
state = {"w": torch.full((30,), -1.0)}
with CheckpointManager(sys.argv[1]) as manager:
    print(manager.latest(), manager.restore(state), state["w"][0].item())
"""


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((30,), value)}


def manager_of(root: Any, background: Any = "thread", **settings: Any) -> CheckpointManager:
    storage = settings.pop("storage", "filesystem")
    config = {"background": background, "storage": storage}
    settings = {"heartbeat_seconds": 0.1, "takeover_seconds": 0.5} | settings
    return CheckpointManager(root, pipeline_of(config), **settings)


def resumed_elsewhere(root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(root)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def held_in_the_writer() -> Iterator[threading.Event]:
    """Every data file waits in its first write until the event is set, or the block ends."""
    go = threading.Event()
    real = FileChanges.sync

    def sync(self: FileChanges, descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.basename(name).startswith("__0_"):
            assert go.wait(60)
        real(self, descriptor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileChanges, "sync", sync)
        try:
            yield go
        finally:
            go.set()


def test_t06_t11_the_old_step_is_there_until_the_new_one_is(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep_last=1) as manager:
        manager.save(1, state(1.0))
        with held_in_the_writer() as go:
            future = manager.async_save(2, state(2.0))
            assert not future.done()  # type: ignore[union-attr]
            assert manager.latest() == 1 and manager.steps() == [1]
            assert (tmp_path / "step-1" / "manifest.json").exists()
            assert resumed_elsewhere(tmp_path) == "1 1 1.0"
            go.set()
            manager.wait()
        assert manager.latest() == 2 and manager.steps() == [2]
        assert not (tmp_path / "step-1").exists()
        assert resumed_elsewhere(tmp_path) == "2 2 2.0"


@pytest.mark.parametrize("kind", KINDS)
def test_saves_in_a_row(tmp_path: Path, kind: str) -> None:
    heard: list[CheckpointEvent] = []
    weight = torch.zeros(1000)
    with manager_of(tmp_path, kind, keep_last=2, on_event=heard.append) as manager:
        for step in range(1, 6):
            weight.fill_(step)
            manager.async_save(step, {"w": weight}, metrics={"loss": 1.0 / step})
        weight.fill_(-1.0)
        with pytest.raises(FileExistsError, match=r"step-5 is committed|step 5 is being"):
            manager.async_save(5, {"w": weight})
        manager.wait()
        assert manager.steps() == [4, 5]
        assert manager.restore({"w": weight}) == 5 and weight[0] == 5.0
    assert [e.step for e in heard if e.kind == "saved"] == [1, 2, 3, 4, 5]
    assert sorted(e.step or 0 for e in heard if e.kind == "removed") == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def faulty(**fault: Any) -> dict[str, Any]:
    return {"kind": "faulty", "names": "*.distcp", "code": errno.ENOSPC, **fault}


def test_t21_a_failure_that_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Retried once it is saved; where it fails always, training goes on and the old one stays."""
    with manager_of(tmp_path) as manager:
        manager.save(1, state(1.0))
    lenient = {"kind": "thread", "on_error": "warn", "retries": 1}
    with manager_of(tmp_path, lenient, storage=faulty(method="write")) as manager:
        manager.async_save(2, state(2.0))
        manager.wait()
        assert manager.failures == 1 and manager.latest() == 1
        assert "No space left" in caplog.text
        assert not (tmp_path / "step-2").exists()
    with manager_of(tmp_path, {"kind": "thread"}) as manager:
        manager.async_save(3, state(3.0))
    assert resumed_elsewhere(tmp_path) == "3 3 3.0"


def test_t21_retried_once(tmp_path: Path) -> None:
    lenient = {"kind": "thread", "on_error": "warn", "retries": 1}
    failed = []
    real = FileChanges.write

    def write(self: FileChanges, descriptor: int, *arguments: Any) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        if name.endswith(".distcp") and not failed:
            failed.append(name)
            raise OSError(errno.EIO, "Input/output error", name)
        return real(self, descriptor, *arguments)

    with manager_of(tmp_path, lenient) as manager, pytest.MonkeyPatch.context() as patched:
        patched.setattr(FileChanges, "write", write)
        manager.async_save(2, state(2.0))
        manager.wait()
        assert failed and manager.failures == 0 and manager.latest() == 2


@pytest.mark.parametrize("how", ["wait", "close", "next", "exit"])
def test_a_failure_is_heard_at_the_latest_when_the_manager_is_closed(
    tmp_path: Path, how: str
) -> None:
    manager = manager_of(tmp_path, storage=faulty(method="write"))
    manager.async_save(1, state())
    with pytest.raises(OSError, match="No space left"):
        if how == "wait":
            manager.wait()
        elif how == "next":
            manager.async_save(2, state())
        elif how == "close":
            manager.close()
        else:
            with manager:
                pass
    manager.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_that_was_there_before_anybody_looked(tmp_path: Path) -> None:
    """A save that has failed by the time the manager gets its future is not taken for seen."""
    with pipeline_of({"storage": faulty(method="write")}) as pipeline:
        save = pipeline.async_save

        def slow(*arguments: Any, **more: Any) -> Any:
            future = save(*arguments, **more)
            futures.wait([future], 30)
            return future

        pipeline.async_save = slow  # type: ignore[method-assign]
        manager = CheckpointManager(tmp_path, pipeline)
        manager.async_save(1, state())
        assert manager.failures == 1
        with pytest.raises(OSError, match="No space left"):
            manager.close()


def test_what_is_left_out(tmp_path: Path) -> None:
    heard: list[CheckpointEvent] = []
    skipping = {"kind": "thread", "when_full": "skip"}
    asked = [False]
    with manager_of(
        tmp_path, skipping, on_event=heard.append, stop_when=lambda: asked[0]
    ) as manager:
        with held_in_the_writer() as go:
            manager.async_save(1, state(1.0))
            left_out = manager.async_save(2, state(2.0))
            assert left_out.result(5) is None  # type: ignore[union-attr]
            asked[0] = True
            assert manager.should_stop()
            # The last save of a run is not left out: it waits for the one under way.
            threading.Timer(0.3, go.set).start()
            manager.async_save(3, state(3.0))
        manager.wait()
        assert manager.steps() == [1, 3]
    assert [(e.kind, e.step) for e in heard if e.kind in ("saved", "skipped")] == [
        ("skipped", 2), ("saved", 1), ("saved", 3),
    ]  # fmt: skip


@pytest.mark.slow
def test_leaving_waits_for_what_is_under_way(tmp_path: Path) -> None:
    with held_in_the_writer() as go, manager_of(tmp_path) as manager:
        manager.async_save(1, state(1.0))
        threading.Timer(0.3, go.set).start()
    assert resumed_elsewhere(tmp_path) == "1 1 1.0"


def test_a_manager_that_nobody_holds_any_more(tmp_path: Path) -> None:
    pipeline = pipeline_of()
    with pipeline, held_in_the_writer() as go:
        manager = CheckpointManager(tmp_path, pipeline)
        future = manager.async_save(1, state(1.0))
        del manager
        gc.collect()
        assert (tmp_path / ".run.json").exists()
        go.set()
        future.result(30)  # type: ignore[union-attr]
    # What is to be done once the future is done comes after it, in the background.
    assert eventually(lambda: [path.name for path in tmp_path.iterdir()] == ["step-1"])


def test_an_exception_stays_the_one_that_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="the loss"):
        with manager_of(tmp_path, storage=faulty(method="write")) as manager:
            manager.async_save(1, state())
            raise ZeroDivisionError("the loss")
    assert list(tmp_path.iterdir()) == []


def train(root: Path, kind: str) -> Any:
    with manager_of(root, kind, keep_last=2) as manager:
        for step in range(1, 7):
            manager.async_save(step, state_with(float(step)))
            manager.should_stop()
            manager.steps()
        manager.wait()
        found = state_with(-1.0)
        return manager.steps(), manager.restore(found), values_of(found)


@pytest.mark.parametrize("kind", KINDS)
def test_on_ranks(ranks: Pool, tmp_path: Path, kind: str) -> None:
    assert ranks(2).run(train, tmp_path, kind, seconds=120.0) == [([5, 6], 6, {6.0})] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-5", "step-6"]


def fail_in_background(root: Path, rank: int) -> str:
    with manager_of(root) as manager:
        manager.save(1, state_with(1.0))
    dist.barrier()
    try:
        with manager_of(root, storage=faulty(method="write", on_rank=rank)) as manager:
            manager.async_save(2, state_with(2.0))
    except OSError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_on_one_rank_is_heard_on_all(ranks: Pool, tmp_path: Path, rank: int) -> None:
    for message in ranks(2).run(fail_in_background, tmp_path, rank):
        assert f"rank {rank}" in message and "No space left" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
