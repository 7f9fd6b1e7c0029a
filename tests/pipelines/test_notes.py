"""What a caller keeps with a checkpoint, and a guard that has the last word before a commit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline import Manifest, Pipeline, StateError
from tests.distributed.pool import Pool


def manifest_in(path: Path) -> Manifest:
    return Manifest.decode((path / "manifest.json").read_bytes())


def test_notes_are_in_the_manifest(tmp_path: Path) -> None:
    notes = {"step": 3, "metrics": {"loss": 0.25}, "names": ["a", None]}
    with Pipeline() as pipeline:
        pipeline.save({"w": torch.ones(2)}, tmp_path, notes=notes)
        assert manifest_in(tmp_path).notes == notes
        pipeline.save({"w": torch.ones(2)}, tmp_path)
        assert manifest_in(tmp_path).notes == {}
        with pytest.raises(StateError, match="plain JSON"):
            pipeline.save({"w": torch.ones(2)}, tmp_path, notes={"loss": float("nan")})
        with pytest.raises(StateError, match="plain JSON"):
            pipeline.save({"w": torch.ones(2)}, tmp_path, notes={"w": torch.ones(1)})


class Refusing:
    """Refuses at the given call."""

    def __init__(self, at: int) -> None:
        self.calls = 0
        self.at = at

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise PermissionError(13, "not now")


def guarded(path: Path, at: int) -> int:
    guard = Refusing(at)
    with Pipeline() as pipeline:
        if at > 2:
            pipeline.save({"w": torch.ones(2)}, path, guard=guard)
            return guard.calls
        with pytest.raises(PermissionError, match="not now"):
            pipeline.save({"w": torch.ones(2)}, path, guard=guard)
    return guard.calls


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_guard_is_asked_before_the_first_write_and_before_the_commit(
    ranks: Pool, tmp_path: Path, at: int
) -> None:
    calls = ranks(2).run(guarded, tmp_path, at)
    assert calls == [min(at, 2), 0]
    names = (
        {path.name.partition(".")[2] for path in tmp_path.iterdir()} if tmp_path.exists() else set()
    )
    assert ("json" in names) == (at == 3)
    if at < 3:
        assert list(tmp_path.iterdir()) == []


def slowest(path: Path) -> object:
    with Pipeline() as pipeline:
        saved = pipeline.save({f"w{dist.get_rank()}": torch.ones(2)}, path)
    return saved.trace.slowest_writer


def test_the_coordinator_knows_who_was_slowest(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks(2).run(slowest, tmp_path)
    assert second is None
    rank, seconds = first
    assert rank in (0, 1) and seconds > 0
