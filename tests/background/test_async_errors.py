"""Asynchronous saves that fail: where that is raised, and that all ranks hear of it."""

import errno
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline import (
    BackgroundDiedError,
    CheckpointError,
    ConfigError,
    StorageError,
    UnsupportedLeafError,
)
from dcp_pipeline.core.registry import unregister
from tests.background.faults import register_troubled
from tests.background.pipelines import (
    own_processes,
    pipeline_of,
    troubled_pipeline,
)
from tests.distributed.pool import Pool


@pytest.mark.parametrize("then", ["save", "async_save", "check", "wait", "close"])
def test_t20_the_next_call_raises(
    tmp_path: Path, background: str, then: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = troubled_pipeline(background, tmp_path, times=1)
    state = {"w": torch.ones(3)}
    saving = pipeline.async_save(state, tmp_path / "a")
    assert isinstance(saving, Future)
    while not saving.done():
        time.sleep(0.01)
    assert "No space left" in caplog.text
    calls = {
        "save": lambda: pipeline.save(state, tmp_path / "b"),
        "async_save": lambda: pipeline.async_save(state, tmp_path / "b"),
        "check": pipeline.check,
        "wait": pipeline.wait,
        "close": pipeline.close,
    }
    with pytest.raises(StorageError, match="No space left") as caught:
        calls[then]()
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, dcp.CheckpointException)
    assert not (tmp_path / "a").exists() or list((tmp_path / "a").iterdir()) == []
    # It is raised once; then everything goes on.
    if then == "close":
        with pytest.raises(CheckpointError, match="closed"):
            pipeline.async_save(state, tmp_path / "c")
        pipeline = pipeline_of(background)
    pipeline.async_save(state, tmp_path / "c")
    pipeline.close()
    assert dcp_pipeline.load_keys(tmp_path / "c")["w"].tolist() == [1, 1, 1]


def test_what_was_seen_is_not_raised_again(tmp_path: Path, background: str) -> None:
    with troubled_pipeline(background, tmp_path, times=1) as pipeline:
        saving = pipeline.async_save({"w": torch.ones(3)}, tmp_path / "a")
        with pytest.raises(StorageError):
            saving.result()
        pipeline.check()
        pipeline.save({"w": torch.ones(3)}, tmp_path / "b")


def test_a_callback_does_not_count_as_seen(tmp_path: Path) -> None:
    pipeline = troubled_pipeline("thread", tmp_path, times=1)
    seen: list[object] = []
    saving = pipeline.async_save({"w": torch.ones(3)}, tmp_path / "a")
    saving.add_done_callback(lambda future: seen.append(future.exception()))
    with pytest.raises(StorageError):
        pipeline.wait()
    assert len(seen) == 1
    pipeline.close()


def test_retries_and_warnings(
    tmp_path: Path, background: str, caplog: pytest.LogCaptureFixture
) -> None:
    with troubled_pipeline(background, tmp_path, times=1, retries=1, on_error="warn") as pipeline:
        pipeline.async_save({"w": torch.ones(3)}, tmp_path / "a").result()
        assert pipeline.failures == 0 and "tried again" in caplog.text
        assert dcp_pipeline.load_keys(tmp_path / "a")["w"].tolist() == [1, 1, 1]
    with troubled_pipeline(
        background, tmp_path / "x", times=9, retries=1, on_error="warn"
    ) as pipeline:
        for number in range(2):
            pipeline.async_save({"w": torch.ones(3)}, tmp_path / f"b{number}")
        pipeline.wait()
        pipeline.check()
        assert pipeline.failures == 2
    assert not (tmp_path / "b0" / "manifest.json").exists()


def test_a_state_that_cannot_be_stored_raises_at_once(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        with pytest.raises(UnsupportedLeafError, match="'w'"):
            pipeline.async_save({"w": object()}, tmp_path / "a")
        pipeline.async_save({"w": 1}, tmp_path / "b").result()


class Failing:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ValueError("no state today")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def guard() -> None:
    """Lets everything pass, and can be sent to a process."""


def one_cannot(path: Path, background: str) -> None:
    rank = dist.get_rank()
    part = Failing(fails=False)
    state = {f"x{rank}": torch.ones(2), "part": part}
    with pipeline_of(background) as pipeline:
        pipeline.async_save(state, path / "0", guard=guard).result()
        for number in range(2):
            part.fails = rank == 1
            saving = pipeline.async_save(state, path / "a", guard=guard)
            with pytest.raises(ValueError, match=r"rank 1: ValueError: no state today"):
                saving.result()
            with pytest.raises(ValueError, match="no state today"):
                pipeline.check()
            part.fails = False
            pipeline.async_save(state, path / f"b{number}", guard=guard).result()
        if background == "process":
            # What cannot be sent on one rank is told to all, and the next save works.
            local = (lambda: None) if rank == 0 else guard
            with pytest.raises(ConfigError, match=r"rank 0: .*this guard"):
                pipeline.async_save(state, path / "c", guard=local).result()
            with pytest.raises(ConfigError):
                pipeline.wait()
            pipeline.async_save(state, path / "d", guard=guard).result()
    assert not (path / "a" / "manifest.json").exists()


def test_one_rank_has_no_state(ranks: Pool, tmp_path: Path, background: str) -> None:
    ranks(2).run(one_cannot, tmp_path, background)


def full_disk(path: Path, background: str, in_flight: int, then: str) -> None:
    rank = dist.get_rank()
    register_troubled()
    pipeline = troubled_pipeline(background, path, times=1, on_rank=1, max_in_flight=in_flight)
    state = {f"w{rank}": torch.ones(3)}
    saving = pipeline.async_save(state, path / "a")
    if rank == 1:
        # That one rank has asked is no reason for the others to be left alone with it.
        assert saving.exception() is not None
    calls = {
        "save": lambda: pipeline.save(state, path / "b"),
        "async_save": lambda: [pipeline.async_save(state, path / f"b{n}") for n in range(4)],
        "wait": pipeline.wait,
        "close": pipeline.close,
    }
    with pytest.raises(StorageError, match=r"rank 1: .*No space left"):
        calls[then]()
    pipeline.save(state, path / "c")
    pipeline.async_save(state, path / "d") if then != "close" else None
    pipeline.close()
    dist.barrier()
    assert not [name for name in os.listdir(path / "a") if name.endswith(".distcp")]
    unregister("storage", "troubled")


@pytest.mark.parametrize("then", ["save", "async_save", "wait", "close"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_every_rank_raises_at_the_same_call(
    ranks: Pool, tmp_path: Path, background: str, in_flight: int, then: str
) -> None:
    ranks(2).run(full_disk, tmp_path, background, in_flight, then)


def polled(path: Path, background: str) -> None:
    """Whichever rank has heard first: all raise at one poll, and none at the ones before."""
    rank = dist.get_rank()
    register_troubled()
    with troubled_pipeline(background, path, times=1, on_rank=1) as pipeline:
        pipeline.async_save({f"w{rank}": torch.ones(3)}, path / "a")
        polls = 0
        while True:
            try:
                pipeline.check()
            except StorageError as error:
                assert "rank 1" in str(error)
                break
            polls += 1
        counts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(counts, torch.tensor([float(polls)]))
        assert counts[0] == counts[1]
        pipeline.check()
        pipeline.async_save({f"w{rank}": torch.ones(3)}, path / "b")
    unregister("storage", "troubled")


def test_a_poll_raises_on_all_ranks(ranks: Pool, tmp_path: Path, background: str) -> None:
    ranks(2).run(polled, tmp_path, background)


def dying(path: Path, then: str) -> list[str]:
    """T19: the process of rank 1 ends itself with 17."""
    rank = dist.get_rank()
    register_troubled()
    with troubled_pipeline("process", path, times=1, on_rank=1, exit_code=17) as pipeline:
        state = {f"w{rank}": torch.full((3,), 5.0)}
        pipeline.async_save(state, path / "a")
        messages = []
        with pytest.raises(BackgroundDiedError, match=r"rank 1: .*died, exit 17") as caught:
            if then == "check":
                while True:
                    pipeline.check()
            pipeline.async_save(state, path / "b")
        messages.append(str(caught.value))
        pipeline.async_save(state, path / "c")
        pipeline.wait()
        assert dcp_pipeline.load_keys(path / "c", [f"w{rank}"])[f"w{rank}"].tolist() == [5.0] * 3
    unregister("storage", "troubled")
    return messages


@pytest.mark.parametrize("then", ["check", pytest.param("async_save", marks=pytest.mark.slow)])
def test_t19_a_process_that_dies_in_a_save(ranks: Pool, tmp_path: Path, then: str) -> None:
    first, second = ranks(2).run(dying, tmp_path, then)
    assert first == second
    assert not (tmp_path / "a" / "manifest.json").exists()


def dying_idle(path: Path) -> None:
    rank = dist.get_rank()
    state = {f"w{rank}": torch.ones(3)}
    # The function `async_save` keeps its own for as long as its program runs.
    others = {child.pid for child in own_processes()}
    with pipeline_of("process") as pipeline:
        pipeline.async_save(state, path / "a").result()
        if rank == 1:
            (child,) = (found for found in own_processes() if found.pid not in others)
            child.kill()
        with pytest.raises(BackgroundDiedError, match=r"rank 1: .*died") as caught:
            while True:
                pipeline.check()
        assert caught.value.exit_code == -9
        pipeline.check()
        pipeline.async_save(state, path / "b").result()
        pipeline.check()


@pytest.mark.slow
def test_a_process_that_dies_between_saves(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(dying_idle, tmp_path)
