"""What is noted with a step: the metrics of all ranks."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.core.errors import (
    StateError,
)
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.saving import _say_which_metrics_differ
from tests.cases.jobs import pipeline_of, state_with
from tests.distributed.pool import Pool

Log = pytest.LogCaptureFixture


def state(value: float = -1.0) -> dict[str, Any]:
    return {"w": torch.full((4000,), value), "n": {"step": value}}


def saved_with_metrics(root: Path) -> Any:
    rank = dist.get_rank()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dcp_pipeline")
    log.addHandler(handler)
    try:
        with CheckpointManager(root, pipeline_of()) as manager:
            mine = {"loss": 0.5 + rank, "lr": 0.1, "nan": float("nan")}
            manager.save(1, state_with(1.0), metrics=mine | ({"extra": 3} if rank else {}))
            manager.save(2, state_with(2.0), metrics={"loss": 0.5, "nan": float("nan")})
            manager.save(3, state_with(3.0), metrics=None if rank else {"loss": 0.25})
    finally:
        log.removeHandler(handler)
    return warnings


def test_metrics_that_differ_are_said_once(ranks: Pool, tmp_path: Path) -> None:
    expected = (
        "the ranks save step 1 with different metrics, and those of rank 0 are kept:"
        " 'loss' is 0.5 on rank 0, 1.5 on rank 1; 'extra' is 3.0 on rank 1"
    )
    assert ranks(2).run(saved_with_metrics, tmp_path) == [[expected], []]
    kept = [
        json.loads((tmp_path / f"step-{step}" / "manifest.json").read_text())["notes"]["metrics"]
        for step in (1, 2, 3)
    ]
    assert kept == [
        {"loss": 0.5, "lr": 0.1, "nan": "nan"},
        {"loss": 0.5, "nan": "nan"},
        {"loss": 0.25},
    ]


def test_the_values_of_many_ranks_are_not_all_said(caplog: Log) -> None:
    metrics: list[dict[str, float | str]] = [{"loss": float(rank)} for rank in range(20)]
    _say_which_metrics_differ(7, metrics, 0)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.endswith("6.0 on rank 6, 7.0 on rank 7, 12 more")


def test_notes_say_what_was_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        metrics = {"loss": torch.tensor(0.5), "nan": float("nan"), "inf": float("inf"), "n": 3}
        manager.save(1, state(), metrics=metrics)
        with pytest.raises(ValueError, match=r"metrics\['x'\] is no number"):
            manager.save(2, state(), metrics={"x": "much"})  # type: ignore[dict-item]
        with pytest.raises(StateError, match=r"metrics\['loss'\] is no number: None"):
            manager.save(2, state(), metrics={"loss": None})  # type: ignore[dict-item]
        assert manager.steps() == [1]
    notes = json.loads((tmp_path / "step-1" / "manifest.json").read_text())["notes"]
    assert notes["metrics"] == {"loss": 0.5, "nan": "nan", "inf": "inf", "n": 3.0}
