"""When it is time to save."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.intervals import Intervals
from tests.cases.jobs import pipeline_of
from tests.distributed.pool import Pool

STATE = {"w": torch.ones(2)}


def test_steps() -> None:
    intervals = Intervals(10, None)
    assert [step for step in range(35) if intervals.is_due_by_step(step)] == [0, 10, 20, 30]
    assert not intervals.has_minutes and not intervals.is_due_by_time()


def test_minutes_count_from_the_last_save() -> None:
    intervals = Intervals(None, 0.05 / 60)
    assert not intervals.is_due_by_time()
    time.sleep(0.06)
    assert intervals.is_due_by_time()
    intervals.begin()
    assert not intervals.is_due_by_time()


def test_a_step_is_due_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, pipeline_of(), save_every_steps=2) as manager:
        assert manager.should_save(2)
        manager.save(2, STATE)
        assert not manager.should_save(2) and not manager.should_save(3)
        assert manager.should_save(4)


def train_by_the_clock(root: Path) -> Any:
    saved = []
    with CheckpointManager(root, pipeline_of(), save_every_minutes=0.2 / 60) as manager:
        for step in range(1, 16):
            # The clock of one rank decides, so it does not matter that the others are slower.
            time.sleep(0.03 + 0.02 * dist.get_rank())
            if manager.should_save(step):
                manager.save(step, {f"of{dist.get_rank()}": torch.ones(2)})
                saved.append(step)
        return saved, manager.steps()


def test_the_clock_of_one_rank_decides(ranks: Pool, tmp_path: Path) -> None:
    (first, found), *others = ranks(3).run(train_by_the_clock, tmp_path)
    assert 1 <= len(first) < 15 and found == first
    assert all(other == (first, first) for other in others)
