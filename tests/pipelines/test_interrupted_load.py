"""What a load that is interrupted, or fails behind its reading, leaves changed is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_pipeline
from dcp_pipeline.core.errors import RollbackFailedError
from dcp_pipeline.storage.file_source import FileSource


class Owner:
    """Takes its state; what it raises then is set from outside."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((3,), value)
        self.error: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((2000, 500), value), "b": torch.full((7,), value), "o": Owner(value)}


def changed(found: dict[str, Any]) -> set[str]:
    tensors = {"a": found["a"], "b": found["b"], "o.tensor": found["o"].tensor}
    return {name for name, tensor in tensors.items() if not bool((tensor == -1.0).all())}


def load(found: dict[str, Any], path: Path, rollback: str) -> None:
    storage = {"kind": "filesystem", "thread_count": 1}
    config = {"rollback": rollback, "storage": storage}
    dcp_pipeline.load(found, checkpoint_id=path, config=config)


def reads(path: Path, rollback: str) -> int:
    """How often a load of its own reads from a data file."""
    with pytest.MonkeyPatch.context() as patch:
        count = interrupting(patch, -1)
        load(state(-1.0), path, rollback)
    return count[0]


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int) -> list[int]:
    count, read_into = [0], FileSource.read_into

    def read(self: FileSource, offset: int, target: memoryview) -> None:
        if self.name.endswith(".distcp"):
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt
        read_into(self, offset, target)

    monkeypatch.setattr(FileSource, "read_into", read)
    return count


@pytest.mark.parametrize("rollback", ["copy", "verify_first"])
def test_an_interrupt_at_any_read(tmp_path: Path, rollback: str) -> None:
    dcp_pipeline.save(state(1.0), checkpoint_id=tmp_path)
    is_ever_changed = False
    for at in range(1, reads(tmp_path, rollback) + 1):
        found = state(-1.0)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
            interrupting(patch, at)
            load(found, tmp_path, rollback)
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        names = changed(found)
        assert all(name in notes for name in names), (at, names, notes)
        assert ("left changed" in notes) >= bool(names)
        is_ever_changed |= bool(names)
    assert is_ever_changed == (rollback == "verify_first")


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
@pytest.mark.parametrize("rollback", ["copy", "verify_first"])
def test_an_object_that_does_not_take_its_state(
    tmp_path: Path, rollback: str, error: BaseException
) -> None:
    dcp_pipeline.save(state(1.0), checkpoint_id=tmp_path)
    found = state(-1.0)
    found["o"].error = error
    with pytest.raises(BaseException) as caught:
        load(found, tmp_path, rollback)
    if rollback == "copy":
        assert changed(found) == set() and not isinstance(caught.value, RollbackFailedError)
        return
    assert changed(found) == {"a", "b", "o.tensor"}
    if isinstance(error, ValueError):
        assert isinstance(caught.value, RollbackFailedError)
        said = str(caught.value)
    else:
        assert caught.value is error
        said = "\n".join(error.__notes__)
    assert "rollback=verify_first keeps no copies of (a, b, o.tensor)" in said
