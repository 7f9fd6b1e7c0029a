"""What a callback hears of."""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.events import CheckpointEvent
from tests.cases.jobs import pipeline_of
from tests.distributed.pool import Pool

SAVE = ["collect", "stage", "plan", "agree", "write", "commit"]
LOAD = ["collect", "open", "plan", "agree", "share", "read", "settle", "apply"]


def state(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def test_everything_in_order(tmp_path: Path) -> None:
    heard: list[CheckpointEvent] = []
    with CheckpointManager(tmp_path, pipeline_of(), keep_last=1, on_event=heard.append) as manager:
        manager.save(1, state(1.0))
        manager.save(2, state(2.0), metrics={"loss": 0.5})
        manager.restore(state())
    assert [event.node or event.kind for event in heard] == [
        *SAVE, "saved", *SAVE, "saved", "removed", *LOAD, "restored",
    ]  # fmt: skip
    saved = [event for event in heard if event.kind == "saved"]
    assert [event.step for event in saved] == [1, 2]
    assert saved[1].detail == {"path": manager.path(2), "metrics": {"loss": 0.5}}
    assert saved[1].nbytes is not None and saved[1].nbytes >= 4000
    assert saved[1].slowest_rank == 0 and saved[1].slowest_seconds is not None
    written = next(event for event in heard if event.node == "write")
    assert written.nbytes is not None and written.nbytes >= 4000 and written.seconds > 0
    (restored,) = [event for event in heard if event.kind == "restored"]
    assert restored.step == 2 and restored.nbytes is not None and restored.nbytes >= 4000
    assert restored.detail == {"path": manager.path(2), "is_verified": True}
    (removed,) = [event for event in heard if event.kind == "removed"]
    assert removed.step == 1


def test_what_goes_wrong(tmp_path: Path) -> None:
    heard: list[CheckpointEvent] = []
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        manager.save(1, state(1.0))
        manager.save(2, state(2.0))
    next((tmp_path / "step-2").glob("__0_*")).unlink()
    failing = pipeline_of({"storage": {"kind": "faulty", "code": errno.ENOSPC}})
    with CheckpointManager(tmp_path, failing, on_event=heard.append) as manager:
        assert manager.restore(state()) == 1
        with pytest.raises(OSError, match="No space left"):
            manager.save(3, state(3.0))
        assert manager.failures == 1
    damaged, failed = (e for e in heard if e.kind in ("damaged", "failed"))
    assert damaged.step == 2 and "is missing" in damaged.detail["error"]
    assert failed.step == 3 and "ENOSPC" in failed.detail["error"]


def test_an_error_of_the_callback_is_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: CheckpointEvent) -> None:
        raise RuntimeError("no connection")

    with CheckpointManager(tmp_path, pipeline_of(), on_event=fail) as manager:
        manager.save(1, state())
        assert manager.restore(state()) == 1
    assert "no connection" in caplog.text


def hear(root: Path) -> Any:
    heard: list[CheckpointEvent] = []
    with CheckpointManager(root, pipeline_of(), on_event=heard.append) as manager:
        manager.save(1, {f"of{dist.get_rank()}": torch.ones(10 + 10**6 * dist.get_rank())})
    (saved,) = [event for event in heard if event.kind == "saved"]
    return {event.rank for event in heard}, saved.slowest_rank, saved.nbytes


def test_every_rank_hears_of_its_own(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(hear, tmp_path)
    assert first[0] == {0} and second[0] == {1}
    # Who was the slowest is known where the ranks' receipts come together.
    assert first[1] in (0, 1) and second[1] is None
    assert second[2] > 10**6 > first[2]
