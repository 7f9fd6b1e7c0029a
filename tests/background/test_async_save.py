"""Asynchronous saves in a thread and in a process: snapshots, order, errors, memory, ends."""

import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    BackgroundDiedError,
    CheckpointError,
    ConcurrentSaveError,
    ConfigError,
    CoordinationError,
    GraphError,
    Node,
    Pipeline,
    PipelineConfig,
    StorageError,
    UnsupportedLeafError,
)
from dcp_pipeline.core.registry import unregister
from tests.background.faults import TroubledConfig, register_troubled
from tests.distributed.pool import Pool
from tests.equal import assert_same

ALWAYS = ["thread", "process"]
MOSTLY_THREAD = ["thread", pytest.param("process", marks=pytest.mark.slow)]
"""A process takes seconds to start."""


@pytest.fixture(params=MOSTLY_THREAD)
def background(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def own_processes() -> list[psutil.Process]:
    """The background processes of this one."""
    return [
        child
        for child in psutil.Process().children()
        if any("multiprocessing.spawn" in word for word in child.cmdline())
    ]


def pipeline_of(background: str, **settings: Any) -> Pipeline:
    """Of a ``background``, with fields of it and other keys of a config."""
    own = {"max_in_flight", "when_full", "on_error", "retries", "close_timeout_seconds"}
    chosen = {"kind": background, **{k: settings.pop(k) for k in own & set(settings)}}
    return Pipeline(PipelineConfig(background=chosen, **settings))


def everything(value: int) -> dict[str, Any]:
    """One of every kind of leaf, all of which show ``value``."""
    weight = torch.full((3, 5), float(value))
    return {
        "nothing": {},
        "tensor": weight,
        "tied": weight,
        "strided": torch.full((4, 6), value).t(),
        "bytes": torch.full((7,), value, dtype=torch.uint8),
        "small": torch.full((2,), float(value)).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 3),
        "conj": torch.full((2,), complex(value, 1)).conj(),
        "array": np.full(3, value),
        "number": value,
        "list": [value, {"deep": value}],
        "nested": {"dict": {"n": value}, "tensors": [torch.full((2,), value)]},
        "text": f"value {value}",
    }


def in_order(value: Any) -> Any:
    """A state whose dicts are sorted."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(child) for child in value] if isinstance(value, list) else value


def change(state: dict[str, Any]) -> None:
    """What a trainer does next: every value in place, and the containers too."""
    for name in ("tensor", "strided", "bytes", "scalar"):
        state[name].fill_(77)
    state["small"].view(torch.uint8).fill_(0)
    state["array"][:] = 77
    state["number"] = 77
    state["list"].append(77)
    state["list"][1]["deep"] = 77
    state["nested"]["dict"]["n"] = 77
    state["nested"]["tensors"][0].fill_(77)
    state["nothing"]["more"] = 77
    state["text"] = "changed"


@pytest.mark.parametrize("background", ALWAYS)
def test_the_snapshot_is_the_moment_of_the_call(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        for value in range(1, 4):
            state = everything(value)
            saving = pipeline.async_save(state, tmp_path / str(value))
            change(state)
            assert isinstance(saving, Future)
        saving.result()
        for value in range(1, 4):
            loaded = dcp_pipeline.load_keys(tmp_path / str(value))
            assert_same(in_order(loaded), in_order(everything(value)))


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_what_lands_is_what_a_synchronous_save_writes(
    tmp_path: Path, background: str, serialization: str
) -> None:
    notes = {"step": 4}
    with pipeline_of(background, serialization=serialization) as pipeline:
        pipeline.save(everything(5), tmp_path / "sync", notes=notes)
        saved = pipeline.async_save(everything(5), tmp_path / "async", notes=notes)
        assert isinstance(saved, Future)
        result = saved.result()
        assert result.manifest.notes == notes
        assert {t.node for t in result.trace.timings} == {
            "collect", "stage", "plan", "agree", "write", "commit",
        }  # fmt: skip
        assert set(result.state_dict_metadata) == {n for n in result.manifest.names}
    sync, other = (
        dcp_pipeline.Manifest.decode((tmp_path / name / "manifest.json").read_bytes())
        for name in ("sync", "async")
    )
    assert sync.names == other.names and sync.empty == other.empty
    assert [file.size for file in sync.files] == [file.size for file in other.files]
    assert dcp_pipeline.verify(tmp_path / "async").is_well


def test_plain_dcp_reads_it(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        pipeline.async_save({"w": torch.arange(6.0), "step": 3}, tmp_path)
    loaded = {"w": torch.zeros(6), "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["step"] == 3 and torch.equal(loaded["w"], torch.arange(6.0))


def test_nothing_to_save(tmp_path: Path, background: str) -> None:
    with pipeline_of(background) as pipeline:
        for number in range(2):
            pipeline.async_save({}, tmp_path / str(number))
    assert dcp_pipeline.load_keys(tmp_path / "1") == {}


# On several ranks


def in_a_row(path: Path, background: str, in_flight: int) -> list[float]:
    """T23: three saves without waiting."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
    state = {"shard": shard, f"own{rank}": torch.zeros(5), "step": 0}
    with pipeline_of(background, max_in_flight=in_flight) as pipeline:
        for value in range(3):
            shard.to_local().fill_(value)
            state[f"own{rank}"].fill_(value + 10 * rank)
            state["step"] = value
            pipeline.async_save(state, path / str(value))
            # Collectives of training in between never mix with those of the saves.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert float(tensor) == dist.get_world_size()
        pipeline.wait()
        found = []
        for value in range(3):
            pipeline.load(state, path / str(value))
            assert isinstance(shard, DTensor)
            assert bool((shard.full_tensor() == value).all())
            assert bool((state[f"own{rank}"] == value + 10 * rank).all())
            found.append(state["step"])
    return found


@pytest.mark.parametrize("in_flight", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_t23_three_saves_in_a_row(
    ranks: Pool, tmp_path: Path, background: str, in_flight: int
) -> None:
    assert ranks(2).run(in_a_row, tmp_path, background, in_flight) == [[0, 1, 2]] * 2


@pytest.mark.slow
def test_in_a_row_on_three_ranks(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(3).run(in_a_row, tmp_path, "process", 2) == [[0, 1, 2]] * 3


def two_pipelines(path: Path) -> None:
    """Saves of two pipelines at a time do not take one another's messages."""
    rank = dist.get_rank()
    pipelines = [pipeline_of("thread", max_in_flight=3) for _ in range(2)]
    for value in range(3):
        for number, pipeline in enumerate(pipelines):
            state = {f"w{rank}": torch.full((4,), float(10 * number + value))}
            pipeline.async_save(state, path / f"{number}-{value}")
    for pipeline in pipelines:
        pipeline.close()
    for number in range(2):
        for value in range(3):
            loaded = dcp_pipeline.load_keys(path / f"{number}-{value}", [f"w{rank}"])
            assert float(loaded[f"w{rank}"][0]) == 10 * number + value


def test_two_pipelines_at_a_time(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(two_pipelines, tmp_path)


def saving_beside(path: Path) -> None:
    """A synchronous save and a load while an asynchronous one is under way."""
    rank = dist.get_rank()
    state = {f"w{rank}": torch.full((4,), 1.0)}
    with pipeline_of("thread") as pipeline:
        pipeline.async_save(state, path / "first")
        state[f"w{rank}"].fill_(2)
        pipeline.save(state, path / "second")
        pipeline.load(state, path / "first")
        assert float(state[f"w{rank}"][0]) == 1
        pipeline.async_save(state, path / "third")
        pipeline.load(state, path / "second")
        assert float(state[f"w{rank}"][0]) == 2


def test_beside_synchronous_ones(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(saving_beside, tmp_path)


# Errors


@pytest.fixture(autouse=True)
def troubled() -> Iterator[None]:
    register_troubled()
    yield
    unregister("storage", "troubled")


def troubled_pipeline(background: str, path: Path, **fields: Any) -> Pipeline:
    own = set(TroubledConfig.model_fields)
    storage = {k: fields.pop(k) for k in own & set(fields)}
    storage = TroubledConfig(count_in=str(path / "faults"), **storage)
    return pipeline_of(background, storage=storage, **fields)


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
    with pipeline_of("process") as pipeline:
        pipeline.async_save(state, path / "a").result()
        if rank == 1:
            (child,) = own_processes()
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


@pytest.mark.parametrize("background", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_t26_memory_is_flat(tmp_path: Path, background: str) -> None:
    state = {f"w{number}": torch.ones(1 << 20) for number in range(8)}  # 32 MiB
    process, children, sizes = psutil.Process(), [], []
    with pipeline_of(background) as pipeline:
        for number in range(20):
            pipeline.async_save(state, tmp_path / str(number % 3)).result()
            children = own_processes()
            gc.collect()
            sizes.append([resident(process), *map(resident, children)])
        assert len(children) == (background == "process")
        for before, after in zip(sizes[2], sizes[-1], strict=True):
            assert after <= before + (16 << 20)
        before_closing = resident(process)
    assert resident(process) < before_closing - (24 << 20)
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


# DCP's words


def test_the_function_of_dcps_signature(tmp_path: Path) -> None:
    for kind in AsyncCheckpointerType:
        state = {"w": torch.ones(4)}
        saving = dcp_pipeline.async_save(
            state, checkpoint_id=tmp_path / kind.value, async_checkpointer_type=kind
        )
        state["w"].zero_()
        assert isinstance(saving, Future)
        assert isinstance(saving.result(), dcp_pipeline.Metadata)
        assert dcp_pipeline.load_keys(tmp_path / kind.value)["w"].tolist() == [1] * 4


class Counting:
    """An AsyncStager of a user."""

    def __init__(self, in_future: bool = False) -> None:
        self.calls: list[str] = []
        self._in_future = in_future
        self.future: Future[Any] = Future()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.calls.append("stage")
        copied = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in state_dict.items()
        }
        if not self._in_future:
            return copied
        threading.Timer(0.2, self.future.set_result, [copied]).start()
        return self.future

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("in_future", [False, True])
def test_a_stager_of_a_user(tmp_path: Path, in_future: bool) -> None:
    stager, state = Counting(in_future), {"w": torch.ones(4), "n": 3}
    with Pipeline() as pipeline:
        saving = pipeline.async_save(state, tmp_path, async_stager=stager)
        if in_future:
            assert isinstance(saving, AsyncSaveResponse)
            assert saving.staging_completion.result() is None
            saving = saving.upload_completion
        state["w"].zero_()
        assert isinstance(saving, Future)
        saving.result()
    assert stager.calls == ["stage"] if in_future else ["stage", "synchronize"]
    assert dcp_pipeline.load_keys(tmp_path)["w"].tolist() == [1] * 4


def test_torchs_stager_and_their_planner_and_writer(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "n": 3}
    stager = dcp_pipeline.DefaultStager(dcp_pipeline.StagingOptions(False, False, False, False))
    savings = [
        dcp_pipeline.async_save(state, checkpoint_id=tmp_path / "0", async_stager=stager),
        dcp_pipeline.async_save(
            state, checkpoint_id=tmp_path / "1", planner=dcp.DefaultSavePlanner()
        ),
        dcp_pipeline.async_save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "2")),
        dcp_pipeline.async_save(state, checkpoint_id=tmp_path / "3", use_collectives=False),
    ]
    state["w"].zero_()
    for saving in savings:
        assert isinstance(saving, Future)
        saving.result()
    for number in range(4):
        loaded = {"w": torch.zeros(4), "n": 0}
        dcp_pipeline.load(loaded, checkpoint_id=tmp_path / str(number))
        assert loaded["w"].tolist() == [1] * 4 and loaded["n"] == 3
    stager.close()


def test_a_stager_of_a_user_and_a_process(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "n": 3}
    with pipeline_of("process") as pipeline:
        saving = pipeline.async_save(state, tmp_path, async_stager=Counting())
        state["w"].zero_()
        assert isinstance(saving, Future)
        saving.result()
    assert dcp_pipeline.load_keys(tmp_path)["w"].tolist() == [1] * 4


def test_a_planner_of_dcps_and_a_process_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save in a thread"):
        dcp_pipeline.async_save(
            {},
            checkpoint_id=tmp_path,
            planner=dcp.DefaultSavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )


# What cannot be


def test_combinations_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="stager"):
        Pipeline.from_config({"background": "process", "stager": "host"})
    with pytest.raises(ConfigError, match="background"):
        Pipeline.from_config({"background": "process", "storage": "memory"})


def late(entries: object) -> None:
    raise AssertionError


def late_value(staged: object) -> None:
    return None


def test_a_node_behind_the_snapshot_cannot_look_at_the_live_state(tmp_path: Path) -> None:
    node = Node("late", late, ("entries", "manifest"), ())
    with pytest.raises(GraphError, match="'late' needs 'entries'"):
        Pipeline(save_nodes=[node]).async_save({}, tmp_path)


def test_a_node_of_a_user_runs_in_the_background(tmp_path: Path, background: str) -> None:
    node = Node("late", late_value, ("staged",), ("seen",))
    pipeline = Pipeline(PipelineConfig(background=background), save_nodes=[node])
    with pipeline:
        result = pipeline.async_save({"w": torch.ones(2)}, tmp_path).result()
        assert result.trace["late"].seconds >= 0


def test_what_cannot_be_sent_to_a_process_is_named(tmp_path: Path) -> None:
    node = Node("local", lambda staged: None, ("staged",), ("seen",))
    with Pipeline(PipelineConfig(background="process"), save_nodes=[node]) as pipeline:
        with pytest.raises(ConfigError, match="importable by their names"):
            pipeline.async_save({"w": torch.ones(2)}, tmp_path).result()
