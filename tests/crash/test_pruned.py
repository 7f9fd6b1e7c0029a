"""``prune`` after a save that was killed at any change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow

SCENES = [("ours", "safetensors"), slow("ours", "torch_save")]


@pytest.mark.parametrize(("start", "serialization"), SCENES)
def test_prune_after_a_save_that_was_killed(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_alone", str(tmp_path), start, serialization, 4, False, True)
    assert found["problems"] == []
    assert len(found["points"]) > 20


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_the_power_is_lost_after_prune(
    crash: Callable[..., Any], tmp_path: Path, serialization: str
) -> None:
    found = crash("blackout:lose_power_after_prune", str(tmp_path), "ours", serialization)
    assert found["problems"] == []
