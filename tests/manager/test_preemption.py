"""A run that is asked to end: all ranks hear of it at the same step, however often it is said."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.preemption import StopRequests
from tests.cases.jobs import pipeline_of
from tests.distributed.pool import Pool

STATE = {"w": torch.ones(2)}


@pytest.fixture(autouse=True)
def unchanged_handlers() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGUSR2)}
    yield
    assert {name: signal.getsignal(name) for name in before} == before


def send(name: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), name)


def test_a_signal_ends_the_loop_and_not_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = []
    with CheckpointManager(tmp_path, pipeline_of(), save_every_steps=100) as manager:
        for step in range(1, 100):
            if step == 3:
                send()
                send()  # impatient
            is_last = manager.should_stop()
            if is_last or manager.should_save(step):
                manager.save(step, STATE)
                saved.append(step)
            if is_last:
                send()  # and again, while the program ends
                break
        assert manager.should_stop() and manager.should_save(4) and not manager.should_save(3)
        assert manager.steps() == saved == [3]
    assert "stopping: SIGTERM on rank 0; " in caplog.text
    assert caplog.text.count("stopping: ") == 1


def test_signals_are_caught_from_the_first_call_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not manager.should_stop()
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_signals(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"stop_signals": ["SIGUSR2"]}
    with CheckpointManager(tmp_path, pipeline_of(), **settings) as manager:
        assert not manager.should_stop()
        send(signal.SIGUSR2)
        assert manager.should_stop()


def test_a_handler_that_was_set_since_stays() -> None:
    mine: list[int] = []
    requests = StopRequests(["SIGUSR2"], 30.0)
    requests.listen()

    def handler(number: int, frame: object) -> None:
        mine.append(number)

    signal.signal(signal.SIGUSR2, handler)
    requests.restore()
    assert signal.getsignal(signal.SIGUSR2) is handler
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_an_ignored_signal_is_ignored_again() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    requests = StopRequests(["SIGUSR2"], 30.0)
    requests.listen()
    requests.restore()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_callable(tmp_path: Path) -> None:
    asked = []

    def is_time_up() -> bool:
        asked.append(1)
        return len(asked) == 3

    with CheckpointManager(tmp_path, pipeline_of(), stop_when=is_time_up) as manager:
        answers = [manager.should_stop() for _ in range(5)]
    assert answers == [False, False, True, True, True] and len(asked) == 3


def test_outside_of_the_main_thread_a_callable_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[bool] = []

    def train() -> None:
        with CheckpointManager(tmp_path, pipeline_of(), stop_when=lambda: True) as manager:
            answers.append(manager.should_stop())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert answers == [True]
    assert "SIGTERM cannot be caught outside of the main thread" in caplog.text


def test_the_grace_period() -> None:
    requests = StopRequests(["SIGUSR2"], 30.0)
    assert requests.seconds_left() == 30.0
    requests.listen()
    send(signal.SIGUSR2)
    assert requests.reason() == "SIGUSR2" and 29.0 < requests.seconds_left() < 30.0
    requests.restore()


def stop_on(rank: int, root: Path) -> Any:
    seen = []
    with CheckpointManager(root, pipeline_of()) as manager:
        for step in range(1, 50):
            if step == 4 and dist.get_rank() == rank:
                send()
            if manager.should_stop():
                manager.save(step, {f"of{dist.get_rank()}": torch.ones(1)})
                seen.append(step)
                break
        return seen, manager.steps()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_ranks_leave_together(ranks: Pool, tmp_path: Path, rank: int) -> None:
    assert ranks(3).run(stop_on, rank, tmp_path) == [([4], [4])] * 3


def ask_with_an_error(root: Path) -> None:
    def ask() -> bool:
        if dist.get_rank() == 1:
            raise RuntimeError("the scheduler does not answer")
        return False

    with CheckpointManager(root, pipeline_of(), stop_when=ask) as manager:
        manager.should_stop()


def test_a_callable_that_fails_on_one_rank(ranks: Pool, tmp_path: Path) -> None:
    failures = ranks(2).fail(ask_with_an_error, tmp_path)
    assert all("rank 1: RuntimeError: the scheduler does not answer" in f.message for f in failures)
