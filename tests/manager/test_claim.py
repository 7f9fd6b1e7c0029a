"""Two jobs and one root: refused or kept apart, never mixed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline import Node, Pipeline
from dcp_pipeline.core.errors import ConcurrentSaveError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.manager import CheckpointManager, claim
from dcp_pipeline.manager.claim import RUN
from tests.cases.jobs import pipeline_of
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_seconds": 0.1, "takeover_seconds": 0.5}


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value)}


def manager_of(root: Any, **settings: Any) -> CheckpointManager:
    return CheckpointManager(root, pipeline_of(), **QUICK, **settings)


def someone(pid: int, host: str | None = None, started: str = "") -> ProcessIdentity:
    here = ProcessIdentity.current()
    return ProcessIdentity(host or here.host, here.boot, here.namespace, pid, started)


def leave_mark(root: Path, owner: ProcessIdentity, heartbeat: float = 0.1) -> Path:
    root.mkdir(exist_ok=True)
    (root / RUN).write_bytes(owner.encode(run="0" * 32, heartbeat_seconds=heartbeat))
    return root / RUN


def test_a_run_marks_its_root_and_takes_the_mark_away(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state())
        mark = json.loads((tmp_path / RUN).read_text())
        assert mark["pid"] == os.getpid()
        notes = json.loads((tmp_path / "step-1" / "manifest.json").read_text())["notes"]
        assert notes == {"step": 1, "metrics": {}, "run": mark["run"]}
        before = (tmp_path / RUN).stat().st_mtime_ns
        time.sleep(0.3)
        assert (tmp_path / RUN).stat().st_mtime_ns > before
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    manager = manager_of(tmp_path)
    manager.save(2, state())
    del manager  # nobody has closed it
    assert not (tmp_path / RUN).exists()


def test_the_root_of_a_process_that_is_gone_is_taken_over_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "0"])
    child.wait()
    leave_mark(tmp_path, someone(child.pid, started="1"), heartbeat=1000.0)
    started = time.monotonic()
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        manager.save(1, state())
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("host", [None, "another-host"])
def test_a_root_whose_mark_is_renewed_is_refused(tmp_path: Path, host: str | None) -> None:
    sleeping = subprocess.Popen(["sleep", "60"])
    mark = leave_mark(tmp_path, someone(sleeping.pid, host))
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.1):
            os.utime(mark)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(ConcurrentSaveError) as caught:
            manager_of(tmp_path).save(1, state())
    finally:
        done.set()
        thread.join()
        sleeping.kill()
        sleeping.wait()
    where = host or ProcessIdentity.current().host
    assert f"process {sleeping.pid} on {where}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [RUN]


def test_a_mark_that_nobody_renews_is_taken_over(tmp_path: Path) -> None:
    mark = leave_mark(tmp_path, someone(1, "another-host"))
    started = time.monotonic()
    with manager_of(tmp_path) as manager:
        manager.save(1, state())
        assert json.loads(mark.read_bytes())["pid"] == os.getpid()
    assert 0.5 <= time.monotonic() - started < 5


@pytest.mark.parametrize("content", [b"", b"\0" * 40, b"[1]", b"{}", b'{"heartbeat_seconds": "x"}'])
def test_a_mark_that_says_nothing(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "_UNKNOWN_HEARTBEAT", 0.1)
    (tmp_path / RUN).write_bytes(content)
    with manager_of(tmp_path) as manager:
        manager.save(1, state())
        assert json.loads((tmp_path / RUN).read_bytes())["pid"] == os.getpid()


def test_managers_of_one_process_share_a_root(tmp_path: Path) -> None:
    first, second = manager_of(tmp_path), manager_of(tmp_path)
    first.save(1, state())
    second.save(2, state())
    first.close()
    second.save(3, state())
    assert second.steps() == [1, 2, 3]
    second.close()
    assert not (tmp_path / RUN).exists()


def test_in_memory() -> None:
    root = f"memory://{uuid.uuid4().hex}"
    pipeline = pipeline_of({"storage": "memory"})
    with CheckpointManager(root, pipeline, keep_last=2, **QUICK) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(float(step)))
        assert manager.path(3) == f"{root}/step-3"
        assert manager.steps() == [2, 3] and manager.latest() == 3
        manager.pin(2)
        manager.save(4, state(4.0))
        assert manager.steps() == [2, 3, 4]
        found = state()
        assert manager.restore(found) == 4 and found["w"][0] == 4


def test_a_root_that_vanished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    with manager_of(root) as manager:
        manager.save(1, state())
        shutil.rmtree(root)
        manager.save(2, state())
        assert "is gone from" in caplog.text
        assert manager.steps() == [2]


PROGRAM = """
import sys, torch
from dcp_pipeline.manager import CheckpointManager, claim
manager = CheckpointManager(sys.argv[1], heartbeat_seconds=0.1, takeover_seconds=0.5)
for line in sys.stdin:
    try:
        manager.save(int(line), {"w": torch.full((3,), float(line))})
        print("saved", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "), flush=True)
manager.close()
"""


class Job:
    """Another process that saves the steps it is told."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def save(self, step: int) -> str:
        self.ask(step)
        return self.answer()

    def ask(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def test_two_jobs(tmp_path: Path) -> None:
    """The second is refused while the first lives, and takes over once it is stopped; then the
    first, when it goes on, is kept out."""
    job = Job(tmp_path)
    try:
        assert job.save(1) == "saved"
        with manager_of(tmp_path) as manager:
            with pytest.raises(ConcurrentSaveError, match=f"process {job.process.pid} on"):
                manager.save(2, state(2.0))
            job.process.send_signal(signal.SIGSTOP)
            manager.save(2, state(2.0))
            job.ask(3)
            job.process.send_signal(signal.SIGCONT)
            assert job.answer().startswith("ConcurrentSaveError")
            assert manager.steps() == [1, 2]
            job.end()
            assert (tmp_path / RUN).exists()
            manager.save(4, state(4.0))
    finally:
        job.process.kill()
        job.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2", "step-4"]


@pytest.mark.slow
def test_jobs_that_start_at_once(tmp_path: Path) -> None:
    jobs = [Job(tmp_path) for _ in range(3)]
    try:
        for job in jobs:
            job.ask(7)
        answers = sorted(job.answer().split()[0] for job in jobs)
        assert answers == ["ConcurrentSaveError", "ConcurrentSaveError", "saved"]
    finally:
        for job in jobs:
            job.end()
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]


def test_a_job_that_was_killed(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.save(1) == "saved"
    job.process.kill()
    job.end()
    started = time.monotonic()
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        manager.save(2, state())
        assert time.monotonic() - started < 5
        assert manager.steps() == [1, 2]


def test_a_child_that_was_forked_leaves_the_mark(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        manager.save(1, state())
        child = os.fork()
        if child == 0:
            manager._release()
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmp_path / RUN).exists()
        manager.save(2, state())


def save_refused(root: Path) -> str:
    with manager_of(root) as manager, pytest.raises(ConcurrentSaveError) as caught:
        manager.save(1, {"shared": torch.ones(2)})
    assert dist.get_world_size() == 2
    return str(caught.value)


def test_all_ranks_are_refused(ranks: Pool, tmp_path: Path) -> None:
    job = Job(tmp_path)
    try:
        assert job.save(1) == "saved"
        first, second = ranks(2).run(save_refused, tmp_path)
    finally:
        job.end()
    assert first == second and f"process {job.process.pid}" in first


def test_a_run_that_lost_its_root_while_it_wrote(tmp_path: Path) -> None:
    """The guard looks again right before the commit."""
    lost = []

    def lose(receipt: Any) -> None:
        if receipt.nbytes > 10_000:
            lost.extend((tmp_path / "step-2").glob("*.distcp"))
            leave_mark(tmp_path, someone(1, "another-host"))

    pipeline = Pipeline.builder().node(Node("lose", lose, ("receipt",))).build()
    with pipeline, CheckpointManager(tmp_path, pipeline, **QUICK) as manager:
        manager.save(1, state())
        with pytest.raises(ConcurrentSaveError, match="process 1 on another-host"):
            manager.save(2, {"w": torch.ones(10_000)})
        assert len(lost) == 1, "the data had been written"
        with pytest.raises(ConcurrentSaveError, match="another-host"):
            manager.save(3, state())
        assert manager.failures == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [RUN, "step-1"]
