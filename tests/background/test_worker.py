"""A process beside this one: what it is asked, how it ends, and what ends it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from dcp_pipeline.background.lane import Lane
from dcp_pipeline.background.priority import lower_priority
from dcp_pipeline.background.worker import Worker
from dcp_pipeline.core.errors import BackgroundDiedError, ConfigError
from tests.background.replies import Replies
from tests.marks import slow
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


def started(*arguments: Any, **settings: Any) -> Worker:
    worker = Worker(Replies, arguments, 60.0, **settings)
    worker.wait_until_up()
    return worker


def test_one_life(caplog: pytest.LogCaptureFixture) -> None:
    worker = started("hello", nice=3, io_priority="low")
    process = psutil.Process(worker.pid)
    assert worker.request("name") == "hello" and worker.is_alive and worker.exit_code is None
    assert process.nice() == psutil.Process().nice() + 3
    # An error there is the error here, and it lives on.
    with pytest.raises(ValueError, match="no such question"):
        worker.request("what?")
    with pytest.raises(RuntimeError, match="Unpicklable"):
        worker.request("unpicklable error")
    with pytest.raises(ConfigError, match="cannot be sent"):
        worker.request(lambda: None)
    # A file goes along.
    read, write = os.pipe()
    os.write(write, b"through the pipe")
    assert worker.request("read", read) == b"through the pipe"
    os.close(read)
    os.close(write)
    # Signals for the whole group leave it alone.
    for number in (signal.SIGINT, signal.SIGTERM):
        assert worker.pid is not None
        os.kill(worker.pid, number)
    assert worker.request("name") == "hello"
    with pytest.raises(BackgroundDiedError, match=r"did not answer within 0\.1 s"):
        worker.request("sleep", timeout=0.1)
    worker.close()
    assert not process.is_running() and "died" not in caplog.text


def test_it_is_noticed_when_it_dies(caplog: pytest.LogCaptureFixture) -> None:
    worker = started("x")
    with pytest.raises(BackgroundDiedError, match="died, exit 17") as caught:
        worker.request("exit")
    assert caught.value.exit_code == 17 and not worker.is_alive
    with pytest.raises(BackgroundDiedError, match="died, exit 17"):
        worker.request("name")
    assert eventually(lambda: "died, exit 17" in caplog.text)
    assert caplog.records[-1].levelno == logging.ERROR
    worker.close()


def test_what_cannot_be_made_there_is_raised_here() -> None:
    worker = Worker(Replies, (None,), 60.0)
    with pytest.raises(ValueError, match="needs a name"):
        worker.wait_until_up()
    assert not worker.is_alive
    with pytest.raises(ConfigError, match="importable by their names"):
        Worker(lambda: None, (), 60.0)  # type: ignore[arg-type, return-value]


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
import torch
from dcp_pipeline import Pipeline, PipelineConfig

def main():
    pipeline = Pipeline(PipelineConfig(background={background!r}))
    pipeline.warm_up()
    pipeline.async_save({{"w": torch.full((1 << 20,), 7.0)}}, {path!r})
    print("started", flush=True)
    {end}

if __name__ == "__main__":
    main()
"""


def program(path: Path, background: str, end: str) -> "subprocess.Popen[str]":
    file = path / "program.py"
    text = PROGRAM.format(root=str(ROOT), background=background, path=str(path / "a"), end=end)
    file.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", [slow("return"), slow("raise SystemExit(3)"), "1 / 0"])
def test_a_program_that_ends_without_closing_waits(
    tmp_path: Path, background: str, end: str
) -> None:
    running = program(tmp_path, background, end)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == {"return": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end], errors
    assert (tmp_path / "a" / "manifest.json").exists()
    assert ("ZeroDivisionError" in errors) == (end == "1 / 0") and "not done" not in errors


def test_it_ends_when_its_program_is_killed(tmp_path: Path) -> None:
    running = program(tmp_path, "process", "time.sleep(60)")
    assert running.stdout is not None and running.stdout.readline() == "started\n"
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) == 2  # the process, and what watches over multiprocessing's resources
    running.kill()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert alive == [] and len(gone) == 2
    running.communicate()


# Lanes


def in_lane(lane: Lane, *pieces: Callable[[], None]) -> None:
    done = threading.Event()
    for piece in pieces:
        lane.start(piece)
    lane.start(done.set)
    assert done.wait(10)


def test_a_lane_does_one_after_another() -> None:
    lane, order = Lane(), []

    def piece(number: int) -> Callable[[], None]:
        def work() -> None:
            order.append(("begin", number))
            time.sleep(0.005 * (3 - number))
            order.append(("end", number))

        return work

    in_lane(lane, *(piece(number) for number in range(3)))
    assert order == [(what, number) for number in range(3) for what in ("begin", "end")]


def test_a_thread_gets_its_priority_and_others_keep_theirs() -> None:
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    lane, done = Lane(), threading.Event()
    lane.start(look, nice=4)
    lane.start(look, nice=0, io_priority="idle")
    lane.start(done.set)
    assert done.wait(10)
    assert found == [own + 4, own]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_a_system_without_io_priorities_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "unheard-of")
    lower_priority(0, "idle")
    assert "no I/O priorities" in caplog.text
