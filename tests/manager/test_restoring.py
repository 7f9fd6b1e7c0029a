"""Where a run goes on: the newest checkpoint that loads whole, and never silently from nothing."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DtypeMismatchError,
    ForeignOverwriteError,
    IncompleteCheckpointError,
    NewerFormatError,
    StorageError,
)
from dcp_pipeline.core.manifest import VERSION
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.manager.roots import Root
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools.latest import find_latest
from dcp_pipeline.tools.verify import verify
from tests.cases.jobs import pipeline_of, state_with, values_of
from tests.distributed.pool import Pool

Log = pytest.LogCaptureFixture


def state(value: float = -1.0) -> dict[str, Any]:
    return {"w": torch.full((4000,), value), "n": {"step": value}}


def run_of(root: Path, *steps: int, config: dict[str, Any] | None = None) -> None:
    with CheckpointManager(root, pipeline_of(config)) as manager:
        for step in steps:
            manager.save(step, state(float(step)))


def restored(root: Path, step: int | None = None, **settings: Any) -> tuple[int | None, float]:
    found = state()
    with CheckpointManager(root, pipeline_of(), **settings) as manager:
        chosen = manager.restore(found, step)
    (value,) = values_of(found)
    return chosen, value


def data_of(step: Path) -> Path:
    return max(
        (path for path in step.iterdir() if path.name.startswith("__0_")),
        key=lambda path: path.stat().st_size,
    )


def flip(step: Path) -> None:
    path = data_of(step)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(step: Path) -> None:
    path = data_of(step)
    os.truncate(path, path.stat().st_size - 1)


def append(step: Path) -> None:
    with open(data_of(step), "ab") as file:
        file.write(b"x")


def delete(step: Path) -> None:
    data_of(step).unlink()


def lose_sums(step: Path) -> None:
    next(step.glob("*.sums")).unlink()


def damage_sums(step: Path) -> None:
    path = next(step.glob("*.sums"))
    path.write_bytes(bytes(len(path.read_bytes())))


def damage_record(step: Path) -> None:
    path = step / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"world_size":1', b'"world_size":2'))


def empty_record(step: Path) -> None:
    (step / "manifest.json").write_bytes(b"")


def lose_record(step: Path) -> None:
    for name in ("manifest.json", ".metadata"):
        (step / name).unlink(missing_ok=True)


DAMAGE = [flip, cut, append, delete, lose_sums, damage_sums, damage_record, empty_record]


@pytest.mark.parametrize("damage", [*DAMAGE, lose_record])
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_the_step_before_one_that_is_damaged(
    tmp_path: Path, caplog: Log, damage: Callable[[Path], None], serialization: str
) -> None:
    run_of(tmp_path, 10, 20, 30, config={"serialization": serialization})
    damage(tmp_path / "step-30")
    assert restored(tmp_path) == (20, 20.0)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and f"{tmp_path}/step-30 is skipped: " in warnings[0]


@pytest.mark.parametrize("damage", [*DAMAGE, lose_record])
def test_without_fallback_it_is_an_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run_of(tmp_path, 10, 20)
    damage(tmp_path / "step-20")
    with pytest.raises((CorruptCheckpointError, IncompleteCheckpointError), match="step-20"):
        restored(tmp_path, fallback=False)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_step_that_was_asked_for_never_falls_back(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_of(tmp_path, 10, 20)
    damage(tmp_path / "step-20")
    with pytest.raises(CorruptCheckpointError):
        restored(tmp_path, 20)
    assert restored(tmp_path, 10) == (10, 10.0)
    with pytest.raises(CheckpointNotFoundError, match="step-15"):
        restored(tmp_path, 15)


def test_several_in_a_row(tmp_path: Path, caplog: Log) -> None:
    run_of(tmp_path, *range(1, 10))
    for step, damage in zip(range(2, 10), DAMAGE, strict=True):
        damage(tmp_path / f"step-{step}")
    assert restored(tmp_path) == (1, 1.0)
    skipped = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(skipped) == 8


def test_where_all_are_damaged_nothing_begins_from_nothing(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2, 3)
    for step, damage in ((1, flip), (2, cut), (3, delete)):
        damage(tmp_path / f"step-{step}")
    with pytest.raises(CorruptCheckpointError, match="there are 3 checkpoints in") as caught:
        restored(tmp_path)
    lines = str(caught.value).splitlines()[1:4]
    assert [line.split(":")[0].strip() for line in lines] == ["step 3", "step 2", "step 1"]


def test_nothing_was_ever_committed(tmp_path: Path, caplog: Log) -> None:
    assert restored(tmp_path / "none") == (None, -1.0)
    run_of(tmp_path, 5)
    lose_record(tmp_path / "step-5")
    assert restored(tmp_path) == (None, -1.0)
    assert f"{tmp_path}/step-5 is skipped: incomplete: its save never finished" in caplog.text
    with pytest.raises(IncompleteCheckpointError, match="step-5 is incomplete"):
        restored(tmp_path, fallback=False)


def test_what_would_be_the_same_with_any_other_step_is_raised(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        with pytest.raises(DtypeMismatchError):
            manager.restore({"w": torch.zeros(4000, dtype=torch.int64), "n": {"step": 0.0}})
    record = tmp_path / "step-2" / "manifest.json"
    body = record.read_bytes().rpartition(b',\n"digest"')[0]
    assert b"[%d,%d]" % VERSION in body
    body = body.replace(b"[%d,%d]" % VERSION, b"[9,0]")
    digest = digest_of("xxh3_64", body).hex().encode()
    record.write_bytes(body + b',\n"digest":"' + digest + b'"}\n')
    with pytest.raises(NewerFormatError):
        restored(tmp_path)
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        assert manager.steps() == [1, 2]
        with pytest.raises(NewerFormatError, match="step-2"):
            manager.latest()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_plain_dcp(tmp_path: Path) -> None:
    run_of(tmp_path, 1)
    dcp.save(state(2.0), checkpoint_id=tmp_path / "step-2", no_dist=True)
    assert restored(tmp_path) == (2, 2.0)
    dcp.save(state(3.0), checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ForeignOverwriteError):
        restored(tmp_path, 1)
    next((tmp_path / "step-2").glob("*.distcp")).unlink()
    with pytest.raises(ForeignOverwriteError):
        restored(tmp_path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_latest_is_the_step_that_a_restore_tries_first(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_of(tmp_path, 1, 2, 3)
    has_sizes = damage in (flip, damage_sums)
    has_record = damage not in (damage_record, empty_record)
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        assert manager.latest() == 3
        damage(tmp_path / "step-3")
        assert manager.latest() == (3 if has_sizes else 2)
        assert manager.steps() == ([1, 2, 3] if has_record else [1, 2])
        assert manager.restore(state()) == 2
        for step in (1, 2):
            damage(tmp_path / f"step-{step}")
        assert manager.latest() == (3 if has_sizes else None)
        assert manager.steps() == ([1, 2, 3] if has_record else [])
        with pytest.raises(CorruptCheckpointError, match="none can be loaded"):
            manager.restore(state())
    shown = find_latest(tmp_path).checkpoint
    assert (shown.step if shown else None) == (3 if has_sizes else None)


def test_a_damaged_step_may_be_saved_again(tmp_path: Path) -> None:
    run_of(tmp_path, 10, 20)
    flip(tmp_path / "step-20")
    with CheckpointManager(tmp_path, pipeline_of(), keep_last=1) as manager:
        assert manager.restore(state()) == 10
        with pytest.raises(FileExistsError, match="committed already"):
            manager.save(10, state())
        manager.save(15, state(15.0))
        # Step 20 looks whole by its sizes, but is known not to be: it does not count as the last.
        assert manager.steps() == [15, 20]
        manager.save(20, state(20.0))
        assert manager.steps() == [20]
    assert restored(tmp_path) == (20, 20.0)


@pytest.mark.parametrize("damage", [cut, append, delete, lose_sums, damage_record, empty_record])
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_what_a_look_shows_to_be_damaged_may_be_saved_again(
    tmp_path: Path, caplog: Log, damage: Callable[[Path], None], serialization: str
) -> None:
    config = {"serialization": serialization}
    run_of(tmp_path, 10, 20, config=config)
    damage(tmp_path / "step-20")
    with CheckpointManager(tmp_path, pipeline_of(config)) as manager:
        with pytest.raises(FileExistsError, match="step-10 is committed already"):
            manager.save(10, state())
        assert not caplog.records
        manager.save(20, state(21.0))
        (warning,) = [r.getMessage() for r in caplog.records]
        assert warning.startswith(f"{tmp_path}/step-20 is damaged, and is saved anew: ")
        with pytest.raises(FileExistsError, match="step-20 is committed already"):
            manager.save(20, state())
        assert manager.steps() == [10, 20] and manager.latest() == 20
    assert restored(tmp_path) == (20, 21.0)
    assert verify(tmp_path / "step-20").is_well


@pytest.mark.parametrize("damage", [flip, damage_sums])
def test_what_only_a_read_shows_has_to_be_found_first(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run_of(tmp_path, 10, 20)
    damage(tmp_path / "step-20")
    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        with pytest.raises(FileExistsError, match="step-20 is committed already"):
            manager.save(20, state())
        assert manager.restore(state()) == 10
        manager.save(20, state(21.0))
    assert restored(tmp_path) == (20, 21.0)


def test_a_record_that_may_be_read_at_another_time_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of(tmp_path, 10)
    record = (tmp_path / "step-10" / "manifest.json").read_bytes()

    def failing(*_: object, **__: object) -> Any:
        raise StorageError("step-10/manifest.json: Input/output error", "manifest.json", 5)

    with CheckpointManager(tmp_path, pipeline_of()) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(Root, "summary", failing)
            with pytest.raises(FileExistsError, match="step-10 is committed already"):
                manager.save(10, state())
    assert (tmp_path / "step-10" / "manifest.json").read_bytes() == record


def test_what_one_rank_sees_alone(tmp_path: Path) -> None:
    """A step is not whole because the file of another step is."""
    run_of(tmp_path, 1, 2)
    data_of(tmp_path / "step-2").write_bytes(data_of(tmp_path / "step-1").read_bytes())
    assert restored(tmp_path) == (1, 1.0)


def test_what_differs_is_said(tmp_path: Path, caplog: Log) -> None:
    run_of(tmp_path, 7)
    caplog.set_level(logging.INFO, "dcp_pipeline")
    found = state()
    with Pipeline.from_config({"storage": {"thread_count": 4}, "rollback": "none"}) as pipeline:
        with CheckpointManager(tmp_path, pipeline) as manager:
            assert manager.restore(found) == 7
    lines = [r.getMessage() for r in caplog.records]
    (resumed,) = [line for line in lines if line.startswith("resumed")]
    assert resumed.startswith("resumed from step 7 in ") and resumed.endswith(f"{tmp_path}/step-7")
    (otherwise,) = [line for line in lines if "was saved otherwise" in line]
    assert "rollback: copy -> none" in otherwise and "storage.thread_count: 2 -> 4" in otherwise
    assert "torch" not in otherwise
    caplog.clear()
    assert restored(tmp_path) == (7, 7.0)
    assert "was saved otherwise" not in caplog.text


def damaged_and_restored(root: Path) -> Any:
    found = state_with(-1.0)
    with CheckpointManager(root, pipeline_of(), keep_last=3) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_with(float(step)))
    dist.barrier()
    if dist.get_rank() == 1:
        path = next((root / "step-3").glob("__1_0.*"))
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        next((root / "step-2").glob("__0.*.sums")).unlink()
    dist.barrier()
    with CheckpointManager(root, pipeline_of()) as manager:
        step = manager.restore(found)
    return step, values_of(found)


def test_all_ranks_go_on_from_the_same_step(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(damaged_and_restored, tmp_path) == [(1, {1.0})] * 2


def latest_of_damaged(root: Path) -> Any:
    with CheckpointManager(root, pipeline_of()) as manager:
        return manager.latest(), manager.steps()


def test_all_ranks_hear_of_the_same_latest(ranks: Pool, tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2, 3)
    cut(tmp_path / "step-3")
    empty_record(tmp_path / "step-2")
    assert ranks(2).run(latest_of_damaged, tmp_path) == [(1, [1, 3])] * 2


def restore_all_damaged(root: Path) -> None:
    with CheckpointManager(root, pipeline_of()) as manager:
        manager.restore(state())


def test_all_ranks_hear_that_nothing_is_whole(ranks: Pool, tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2)
    flip(tmp_path / "step-1")
    cut(tmp_path / "step-2")
    failures = ranks(2).fail(restore_all_damaged, tmp_path)
    assert all(f.is_a("CorruptCheckpointError") for f in failures)
    assert all("step 2:" in f.message and "step 1:" in f.message for f in failures)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(tmp_path, 1, 2)
    real = os.preadv

    def failing(descriptor: int, *arguments: Any) -> int:
        if "step-2/__0_" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    assert restored(tmp_path) == (1, 1.0)
    with pytest.raises(OSError, match="Input/output error") as caught:
        restored(tmp_path, 2)
    assert caught.value.errno == 5
