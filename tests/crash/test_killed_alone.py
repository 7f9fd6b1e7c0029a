"""One process, killed before, halfway through and after every change that its save makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_pipeline.storage.changes import FileChanges
from tests.crash.scenes import STARTS
from tests.marks import slow

NOT_MADE = {name for name in vars(FileChanges) if name.startswith("_")}
NOT_MADE |= {"make_directories", "remove_tree"}  # made of others
NOT_MADE |= {"touch", "remove_directory"}  # no short save renews its marker, or removes a directory
NOT_MADE |= {"open_shared"}  # exports alone: test_exports.py
NOT_MADE |= {"link"}  # only where a lock was broken that another process had taken meanwhile
WHEN = ("before", "halfway", "after")

MAIN = [slow("nothing", "torch_save"), slow("ours", "torch_save"), ("ours", "safetensors")]
OTHERS = [
    ("nothing", "safetensors"),
    slow("other", "torch_save"),
    slow("other", "safetensors"),
    slow("plain", "torch_save"),
    slow("plain", "safetensors"),
    slow("left_over", "torch_save"),
    slow("half_committed", "torch_save"),
]


@pytest.mark.parametrize(("start", "serialization"), MAIN)
def test_a_save_killed_at_every_change(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, 1, False)
    assert found["problems"] == []
    kinds = {w: {m for when, m, _ in found["points"] if when == w} for w in WHEN}
    assert kinds["before"] == kinds["after"] == set(found["kinds"])
    assert kinds["halfway"] == {"reserve", "write"}
    if start == "nothing":
        assert kinds["before"] == {*vars(FileChanges)} - NOT_MADE


@pytest.mark.parametrize(("start", "serialization"), OTHERS)
def test_a_save_killed_at_some_changes(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, 8, False)
    assert found["problems"] == []
    assert len(found["points"]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("start", STARTS)
def test_a_save_killed_everywhere(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, 1, True)
    assert found["problems"] == []
    assert len(found["points"]) > 60
