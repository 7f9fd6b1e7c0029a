"""What comes behind a save in the background, and a manager that is closed before that."""

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_pipeline import ConcurrentSaveError, CoordinationError
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.events import CheckpointEvent
from dcp_pipeline.storage.changes import FileChanges
from tests.cases.jobs import state_with
from tests.cases.test_manager_background import faulty, held_in_the_writer, manager_of, state
from tests.distributed.pool import Pool


def leave(manager: CheckpointManager) -> None:
    with manager:
        pass


def unwind(manager: CheckpointManager) -> None:
    with manager:
        raise ZeroDivisionError("the loss")


@pytest.mark.parametrize("owns", [False, True])
@pytest.mark.parametrize(
    ("close", "error", "message"),
    [
        (CheckpointManager.close, CoordinationError, r"still under way after 0\.2 s"),
        (leave, CoordinationError, r"still under way after 0\.2 s"),
        (unwind, ZeroDivisionError, "the loss"),
    ],
)
def test_closing_gives_up_in_time(
    tmp_path: Path,
    close: Callable[[CheckpointManager], None],
    error: type[Exception],
    message: str,
    owns: bool,
) -> None:
    manager = manager_of(tmp_path, {"kind": "thread", "close_timeout_seconds": 0.2})
    manager.save(1, state(1.0))
    manager._owns_pipeline = owns
    with held_in_the_writer():
        future = manager.async_save(2, state(2.0))
        assert isinstance(future, Future)
        with pytest.raises(error, match=message):
            close(manager)
        assert not future.done() and not (tmp_path / ".run.json").exists()
    # The root may be another run's by now.
    assert isinstance(future.exception(60), ConcurrentSaveError)
    with manager_of(tmp_path) as other:
        assert other.latest() == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_step_may_be_saved_again_once_its_future_is_done(
    tmp_path: Path, how: str, fails: bool
) -> None:
    """Also where what comes behind the first save is still under way in the background."""

    def hear(event: CheckpointEvent) -> None:
        if event.kind in ("saved", "failed"):
            time.sleep(0.1)

    def fail(self: FileChanges, descriptor: int, *arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left")

    with manager_of(tmp_path, overwrite="replace", on_event=hear) as manager:
        manager.save(0, state())
        with pytest.MonkeyPatch.context() as patched:
            if fails:
                patched.setattr(FileChanges, "write", fail)
            future: Any = manager.async_save(1, state(1.0))
            assert (future.exception(60) is not None) == fails
        again: Any = getattr(manager, how)(1, state(5.0))
        if how == "async_save":
            again.result(60)
        assert manager.latest() == 1
        found = state()
        assert manager.restore(found) == 1 and found["w"][0] == 5.0


def is_due_again(root: Path, rank: int) -> list[bool]:
    due = []
    manager = manager_of(root, storage=faulty(method="write", on_rank=rank), save_every_steps=1)
    due.append(manager.should_save(1))
    future: Any = manager.async_save(1, state_with(1.0))
    due.append(manager.should_save(1))
    if dist.get_rank() == rank:
        assert future.exception(60).errno == errno.ENOSPC
        time.sleep(0.1)
    due.append(manager.should_save(1))
    with pytest.raises(OSError, match="No space left"):
        manager.close()
    return [*due, manager.should_save(1), manager.should_save(2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_on_what_is_due_after_a_failure(ranks: Pool, tmp_path: Path, rank: int) -> None:
    """It is not for each rank to say when it has heard of a failure in the background."""
    wanted = [True, False, False, False, True]
    assert ranks(2).run(is_due_again, tmp_path, rank) == [wanted, wanted]
