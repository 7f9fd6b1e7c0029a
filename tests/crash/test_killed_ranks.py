"""Two ranks, one of them killed at a change that its save makes; the other ends with an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow

SCENES = [("ours", "torch_save"), ("nothing", "safetensors")]


@pytest.mark.slow  # tests/faults_running/test_commit_lost.py kills it where it commits
@pytest.mark.parametrize(("start", "serialization"), SCENES)
def test_the_coordinator_is_killed(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("sweep:kill_ranks", str(tmp_path), start, serialization, 0, 7, False)
    assert found["problems"] == []
    # Between the replacement of the record and the coordinator's reply.
    assert found["in_doubt"] >= 3


@pytest.mark.parametrize(
    ("start", "serialization", "step"),
    [slow(*SCENES[0], 2), (*SCENES[1], 4)],
)
def test_the_other_rank_is_killed(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str, step: int
) -> None:
    found = crash("sweep:kill_ranks", str(tmp_path), start, serialization, 1, step, False)
    assert found["problems"] == []
    assert found["in_doubt"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("start", ["nothing", "ours", "left_over"])
def test_a_rank_is_killed_everywhere(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str, rank: int
) -> None:
    found = crash("sweep:kill_ranks", str(tmp_path), start, serialization, rank, 1, True)
    assert found["problems"] == []
    assert len(found["points"]) > 20
