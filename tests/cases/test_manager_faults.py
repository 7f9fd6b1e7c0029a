"""What goes wrong in a run under a manager: saves that fail, roots and steps that vanish."""

import errno
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_pipeline import Node, Pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.manager import CheckpointManager
from tests.cases.jobs import state_with
from tests.cases.managers import everything_below, manager_of, state
from tests.distributed.pool import Pool


class Fails:
    """A user's object whose state_dict raises on one rank."""

    def __init__(self, error: BaseException, rank: int) -> None:
        self.error, self.rank = error, rank

    def state_dict(self) -> dict[str, Any]:
        if not dist.is_initialized() or dist.get_rank() == self.rank:
            raise self.error
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def fail_the_second(root: Path, what: str, rank: int) -> Any:
    """Save, fail, and say what is left; then save again."""
    is_here = dist.get_rank() == rank
    config: dict[str, Any] = {}
    if what == "write":
        fault = {"kind": "faulty", "names": "*.distcp", "on_rank": rank, "code": errno.ENOSPC}
        config["storage"] = fault
    with manager_of(root, keep_last=1) as manager:
        manager.save(1, state_with(1.0))
    dist.barrier()
    bad = state_with(2.0)
    if what == "state_dict":
        bad["app"] = Fails(ValueError("the loader is closed"), rank)
    if what == "interrupt" and is_here:
        bad["app"] = Fails(KeyboardInterrupt(), rank)
    ended: BaseException | None = None
    try:
        with manager_of(root, config, keep_last=1) as manager:
            manager.save(2, bad)
    except BaseException as error:
        ended = error
    return type(ended).__name__, [base.__name__ for base in type(ended).__mro__], str(ended)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["write", "state_dict", "interrupt"])
def test_a_save_that_fails(ranks: Pool, tmp_path: Path, what: str, rank: int) -> None:
    endings = ranks(2).run(fail_the_second, tmp_path, what, rank)
    expected = {
        "write": ("OSError", "ENOSPC"),
        "state_dict": ("ValueError", "the loader is closed"),
        "interrupt": ("CoordinationError", f"rank {rank} was lost"),
    }[what]
    for number, (name, bases, message) in enumerate(endings):
        if what == "interrupt" and number == rank:
            assert name == "KeyboardInterrupt"
            continue
        assert expected[0] in bases and expected[1] in message
        assert f"rank {rank}" in message
    time.sleep(0.2)
    assert {path.split("/")[0] for path in everything_below(tmp_path)} == {"step-1"}
    with manager_of(tmp_path) as manager:
        assert manager.latest() == 1


def lose_the_root(root: Path) -> str:
    with manager_of(root) as manager:
        manager.save(1, state_with(1.0))

        class Removes:
            def state_dict(self) -> dict[str, Any]:
                if dist.get_rank() == 0:
                    shutil.rmtree(root)
                return {"value": 1}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                raise NotImplementedError

        with pytest.raises(RuntimeError) as caught:
            manager.save(2, state_with(2.0) | {"app": Removes()})
        dist.barrier()
        assert not (root / "step-2").exists()
        manager.save(3, state_with(3.0))
        assert manager.steps() == [3]
        return str(caught.value)


def test_a_root_that_vanishes_in_a_save(ranks: Pool, tmp_path: Path) -> None:
    messages = ranks(2).run(lose_the_root, tmp_path / "run")
    assert all(".run.json is gone from" in message for message in messages)


def lose_in_the_middle(root: Path, what: str) -> tuple[list[str], str]:
    """The directory goes when the data are written and nothing is committed yet."""

    def lose(receipt: Any) -> None:
        dist.barrier()  # no rank writes any more
        if dist.get_rank() == 1 and (root / "step-2").exists():
            shutil.rmtree(root / what)

    pipeline = Pipeline.builder().node(Node("lose", lose, ("receipt",))).build()
    with pipeline, CheckpointManager(root, pipeline) as manager:
        manager.save(1, state_with(1.0))
        with pytest.raises(CheckpointError) as caught:
            manager.save(2, state_with(2.0))
        dist.barrier()
        assert manager.steps() == ([1] if what == "step-2" else [])
        manager.save(3, state_with(3.0))
        assert manager.latest() == 3
    return [base.__name__ for base in type(caught.value).__mro__], str(caught.value)


@pytest.mark.parametrize("what", ["step-2", "."])
def test_a_directory_that_vanishes_in_the_middle(ranks: Pool, tmp_path: Path, what: str) -> None:
    root = tmp_path / "run"
    first, second = ranks(2).run(lose_in_the_middle, root, what)
    assert first[1] == second[1] and "is gone from" in first[1]
    assert "ConcurrentSaveError" in first[0]
    left = {path.name for path in root.iterdir()}
    assert left == ({"step-1", "step-3"} if what == "step-2" else {"step-3"})


def unwind(root: Path) -> str:
    """One rank's own error; the other is not there to take part in anything."""
    if dist.get_rank() == 1:
        with manager_of(root) as manager:
            manager.save(1, state_with(1.0))
        return "done"
    started = time.monotonic()
    try:
        with manager_of(root) as manager:
            manager.save(1, state_with(1.0))
            raise ZeroDivisionError("the loss")
    except ZeroDivisionError as error:
        assert time.monotonic() - started < 10
        return str(error)


def test_an_exception_unwinds_alone(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(unwind, tmp_path) == ["the loss", "done"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_an_own_pipeline_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
    manager.close()  # once more is as good as once
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(2, state())
    assert not (tmp_path / ".run.json").exists()
