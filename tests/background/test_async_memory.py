"""Asynchronous saves: how many at a time, in how much memory, and how they end."""

import gc
import threading
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import dcp_pipeline
from dcp_pipeline import (
    ConcurrentSaveError,
    CoordinationError,
)
from dcp_pipeline.core.registry import unregister
from tests.background.faults import register_troubled
from tests.background.pipelines import own_processes, pipeline_of, troubled_pipeline
from tests.distributed.pool import Pool
from tests.marks import slow

# Room


@pytest.mark.parametrize("when_full", ["wait", "skip", "error"])
def test_no_room(tmp_path: Path, background: str, when_full: str) -> None:
    gate = tmp_path / "gate"
    with troubled_pipeline(
        background, tmp_path, gate=str(gate), when_full=when_full, max_in_flight=2
    ) as pipeline:
        savings = [
            pipeline.async_save({"n": number}, tmp_path / str(number)) for number in range(2)
        ]
        if when_full == "error":
            with pytest.raises(ConcurrentSaveError, match="2 saves"):
                pipeline.async_save({"n": 2}, tmp_path / "2")
        elif when_full == "skip":
            third = pipeline.async_save({"n": 2}, tmp_path / "2")
            assert isinstance(third, Future) and third.result(0) is None
        else:
            threading.Timer(0.3, gate.touch).start()
            pipeline.async_save({"n": 2}, tmp_path / "2")
            assert savings[0].done()
        gate.touch()
        pipeline.wait()
        assert (tmp_path / "2").exists() == (when_full == "wait")
        pipeline.async_save({"n": 3}, tmp_path / "3").result()
        assert dcp_pipeline.load_keys(tmp_path / "3") == {"n": 3}


def skipping(path: Path) -> list[bool]:
    """Whether a save is left out is the same on all ranks, however far each of them is."""
    rank = dist.get_rank()
    register_troubled()
    made = []
    gate = path / "gate"
    with troubled_pipeline("thread", path, gate=str(gate), when_full="skip") as pipeline:
        for number in range(6):
            saving = pipeline.async_save({f"n{rank}": number}, path / str(number))
            if number == 3 and rank == 0:
                gate.touch()
            if number == 3:
                pipeline.wait()
            made.append(not (saving.done() and saving.result() is None))
    unregister("storage", "troubled")
    return made


def test_skipping_is_the_same_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(skipping, tmp_path)
    assert first == second
    assert first[:5] == [True, False, False, False, True]


# Memory and processes


def test_u07_a_buffer_is_not_used_again_before_it_is_written(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    state = {f"w{number}": torch.full((1000,), 1.0) for number in range(100)}
    with troubled_pipeline(
        "thread", tmp_path, gate=str(gate), max_in_flight=2, stager="host"
    ) as pipeline:
        pipeline.async_save(state, tmp_path / "1")
        for tensor in state.values():
            tensor.fill_(2.0)
        pipeline.async_save(state, tmp_path / "2")
        gate.touch()
        pipeline.wait()
    for value in (1, 2):
        loaded = dcp_pipeline.load_keys(tmp_path / str(value))
        assert all(bool((tensor == value).all()) for tensor in loaded.values())


def resident(process: psutil.Process) -> int:
    """Bytes that are not shared with the file behind a snapshot's buffer."""
    return int(process.memory_full_info().rss)


@pytest.mark.parametrize("background", ["thread", slow("process")])
def test_t26_memory_is_flat(tmp_path: Path, background: str) -> None:
    state = {f"w{number}": torch.ones(1 << 21) for number in range(8)}  # 64 MiB
    process, children, sizes = psutil.Process(), [], []
    with pipeline_of(background) as pipeline:
        for number in range(12):
            pipeline.async_save(state, tmp_path / str(number % 3)).result()
            children = own_processes()
            gc.collect()
            sizes.append([resident(process), *map(resident, children)])
        assert len(children) == (background == "process")
        for before, after in zip(sizes[2], sizes[-1], strict=True):
            assert after <= before + (16 << 20)
        before_closing = resident(process)
    assert resident(process) < before_closing - (32 << 20)
    assert own_processes() == [] and not any(child.is_running() for child in children)


def test_u17_twenty_thousand_tensors(tmp_path: Path) -> None:
    state = {f"layer{number}": torch.full((3,), float(number)) for number in range(20_000)}
    before = psutil.Process().num_fds()
    with pipeline_of("process") as pipeline:
        saving = pipeline.async_save(state, tmp_path)
        assert psutil.Process().num_fds() < before + 32
        saving.result()
        loaded = {f"layer{number}": torch.zeros(3) for number in range(0, 20_000, 997)}
        pipeline.config.to_dict()
    loaded = dcp_pipeline.load_keys(tmp_path, sorted(loaded))
    assert all(tensor.tolist() == [float(name[5:])] * 3 for name, tensor in loaded.items())
    assert psutil.Process().num_fds() <= before + 2


def test_a_state_that_grows_and_shrinks(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        for number, size in enumerate([10, 100_000, 10, 300_000, 1]):
            pipeline.async_save({"w": torch.full((size,), 3.0 + number)}, tmp_path / str(number))
        pipeline.wait()
    for number, size in enumerate([10, 100_000, 10, 300_000, 1]):
        loaded = dcp_pipeline.load_keys(tmp_path / str(number))["w"]
        assert loaded.shape == (size,) and bool((loaded == 3.0 + number).all())


@pytest.mark.slow
def test_warm_up_starts_the_process_and_touches_the_buffers(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 20)}
    with pipeline_of("process") as pipeline:
        pipeline.warm_up(state)
        (child,) = own_processes()
        pipeline.async_save(state, tmp_path).result()
        assert [child] == own_processes()


def warmed_up(path: Path) -> None:
    rank = dist.get_rank()
    with pipeline_of("process") as pipeline:
        pipeline.warm_up({f"w{rank}": torch.ones(4)})
        pipeline.async_save({f"w{rank}": torch.ones(4)}, path).result()


@pytest.mark.slow
def test_warm_up_on_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(warmed_up, tmp_path)


# Closing


def test_closing_gives_up_in_time(tmp_path: Path, background: str) -> None:
    pipeline = troubled_pipeline(
        background, tmp_path, gate=str(tmp_path / "gate"), close_timeout_seconds=0.3
    )
    pipeline.async_save({"w": torch.ones(3)}, tmp_path / "a")
    with pytest.raises(CoordinationError, match=r"still under way after 0\.3 s"):
        pipeline.close()
    assert own_processes() == []
    (tmp_path / "gate").touch()


def test_an_exception_that_unwinds_stays(tmp_path: Path, background: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        troubled_pipeline(background, tmp_path, times=1) as pipeline,
    ):
        pipeline.async_save({"w": torch.ones(3)}, tmp_path / "a")
        1 / 0  # noqa: B018
    assert own_processes() == []


def test_what_is_under_way_is_waited_for_when_an_exception_unwinds(
    tmp_path: Path, background: str
) -> None:
    with pytest.raises(KeyboardInterrupt), pipeline_of(background) as pipeline:
        pipeline.async_save({"w": torch.ones(3)}, tmp_path)
        raise KeyboardInterrupt
    assert dcp_pipeline.load_keys(tmp_path)["w"].tolist() == [1, 1, 1]
