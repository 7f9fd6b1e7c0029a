"""Several jobs on one checkpoint: savers, readers and prune, each in its own process or thread."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.core.errors import ConcurrentSaveError
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools.prune import prune
from tests.crash.forks import Ended, Fork, fork
from tests.faults_running.jobs import left_over, pipeline_of, several_files

__all__ = ["prune_beside", "race", "race_in_threads", "read_beside"]

SECONDS = 120.0


def state_filled(value: float) -> dict[str, Any]:
    """Several tensors full of one number, so that a mixture shows."""
    return {f"w{place}": torch.full((40, 33 + place), value) for place in range(6)}


def values_in(state: dict[str, Any]) -> set[float]:
    return {float(value) for tensor in state.values() for value in tensor.unique()}


def loaded(pipeline: Pipeline, path: Path, no_dist: bool = True) -> float:
    """The number that a checkpoint is full of.

    Raises:
        AssertionError: there are several.
    """
    state = state_filled(-1.0)
    pipeline.load(state, path, no_dist=no_dist)
    (value,) = values_in(state)
    return value


def save_often(path: Path, values: list[float], pause: float = 0.0) -> dict[str, Any]:
    """Save again and again; how often that went well, and what was last saved."""
    ends: Counter[str] = Counter()
    last = None
    with several_files(), pipeline_of() as pipeline:
        for value in values:
            try:
                pipeline.save(state_filled(value), path, no_dist=True)
                ends["saved"] += 1
                last = value
            except ConcurrentSaveError:
                ends["refused"] += 1
            time.sleep(pause * random.random())
    return {"last": last, **ends}


def race(root: str, savers: int, saves: int) -> dict[str, Any]:
    """Several processes save into one checkpoint; what came of it, and what was wrong."""
    path = Path(root, "checkpoint")
    forks = [
        fork(_saving(path, [saver * 1000.0 + turn for turn in range(saves)]))
        for saver in range(savers)
    ]
    ends = [_value(each) for each in forks]
    return _after_race(path, ends)


def _saving(path: Path, values: list[float], pause: float = 0.0) -> Callable[[], Any]:
    return lambda: save_often(path, values, pause)


def race_in_threads(path: Path, saves: int) -> dict[str, Any]:
    """The same with two threads of one process, a pipeline each."""
    ends: list[Any] = []
    with several_files():
        threads = [
            threading.Thread(target=lambda values=values: ends.append(save_often(path, values)))
            for values in ([float(n) for n in range(saves)], [1000.0 + n for n in range(saves)])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _after_race(path, ends)


def _after_race(path: Path, ends: list[dict[str, Any]]) -> dict[str, Any]:
    problems = []
    with several_files(), pipeline_of() as pipeline:
        found = loaded(pipeline, path)
        if found not in [end["last"] for end in ends]:
            problems.append(f"it ends as {found}, the last that were saved are {ends}")
        pipeline.save(state_filled(5.0), path, no_dist=True)
        if loaded(pipeline, path) != 5.0 or left_over(path):
            problems.append(f"the next save leaves {left_over(path)}")
    saved, refused = (sum(end.get(name, 0) for end in ends) for name in ("saved", "refused"))
    return {"saved": saved, "refused": refused, "problems": problems}


def read_beside(root: str, ranks: int, saves: int) -> dict[str, Any]:
    """Ranks load in a loop while another process saves over the checkpoint; what was wrong."""
    path = Path(root, "checkpoint")
    _value(fork(_saving(path, [1.0])))
    done = Path(root, "done")
    readers = [fork(_reading(Path(root), path, done, rank, ranks)) for rank in range(ranks)]
    end = _value(fork(_saving(path, [2.0 + turn for turn in range(saves)], 0.1)))
    done.touch()
    found = [_value(reader) for reader in readers]
    problems = [f"a reader saw {values}" for values in found if values != sorted(values)]
    problems += [f"readers saw {found}"] if any(values != found[0] for values in found) else []
    problems += [] if end["saved"] == saves else [f"the saver: {end}"]
    problems += [] if found[0][-1] == 1.0 + saves else [f"the last load gave {found[0][-1]}"]
    return {"loads": len(found[0]), "different": len(set(found[0])), "problems": problems}


def _reading(root: Path, path: Path, done: Path, rank: int, ranks: int) -> Callable[[], Any]:
    def read() -> list[float]:
        if ranks > 1:
            store = dist.FileStore(str(root / "meeting"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        values = []
        is_last = False
        with pipeline_of() as pipeline:
            while not is_last:
                is_last = _said_by_first(done.exists(), ranks)
                values.append(loaded(pipeline, path, no_dist=ranks == 1))
        return values

    return read


def _said_by_first(answer: bool, ranks: int) -> bool:
    if ranks == 1:
        return answer
    said = torch.tensor([int(answer)])
    dist.broadcast(said, 0)
    return bool(said)


def prune_beside(root: str, saves: int) -> dict[str, Any]:
    """``prune`` in a loop beside saves, the same and new checkpoints; what was wrong."""
    done = Path(root, "done")

    def pruning() -> list[Any]:
        count = 0
        failed: list[str] = []
        while not done.exists():
            failed += prune(root).failed
            count += 1
        return [count, failed]

    def saving() -> list[str]:
        problems = []
        with several_files(), pipeline_of() as pipeline:
            for turn in range(saves):
                path = Path(root, "step-1" if turn % 2 else f"step-{turn + 2}")
                pipeline.save(state_filled(float(turn)), path, no_dist=True)
                found = loaded(pipeline, path)
                problems += [] if found == turn else [f"save {turn} loads as {found}"]
        return problems

    pruner, saver = fork(pruning), fork(saving)
    problems = _value(saver)
    done.touch()
    count, failed = _value(pruner)
    problems += failed
    for path in Path(root).glob("step-*"):
        problems += [f"{path.name} has {left_over(path)}"] if left_over(path) else []
    return {"prunes": count, "problems": problems}


def _value(each: Fork) -> Any:
    end: Ended = each.wait(SECONDS)
    assert end.how == "ok", (end.how, end.error, end.trace)
    return end.value
