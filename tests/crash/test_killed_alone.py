"""One process, killed before, halfway through and after every change that its save makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.scenes import STARTS

KINDS = {
    "close",
    "create",
    "make_directory",
    "remove",
    "replace",
    "reserve",
    "symlink",
    "sync",
    "sync_directory",
    "truncate",
    "write",
}
"""Every method of ``FileChanges`` that a save calls, but for the renewal of its marker."""


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("start", STARTS)
def test_a_save_killed_at_every_change(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, False)
    assert found["problems"] == []
    kinds = {when: {m for w, m, _ in found["points"] if w == when} for when in ("before", "after")}
    assert kinds["before"] == kinds["after"] == KINDS
    assert {m for w, m, _ in found["points"] if w == "halfway"} == {"reserve", "write"}


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("start", STARTS)
def test_a_save_killed_everywhere(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, True)
    assert found["problems"] == []
    assert len(found["points"]) > 80
