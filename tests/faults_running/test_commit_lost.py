"""A rank is lost while the coordinator commits: the others name it, and say what is committed."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

PLACES = ["check", "before", "after", "broadcast"]


@pytest.mark.parametrize("how", ["kill", pytest.param("interrupt", marks=pytest.mark.slow)])
def test_another_rank(forked: Callable[..., Any], tmp_path: Path, how: str) -> None:
    scenes = [[place, victim, how] for place, victim in product(PLACES, (1, 2))]
    assert forked("commit_lost:lose_in_commit", str(tmp_path), scenes) == []


@pytest.mark.slow
def test_another_rank_that_stops(forked: Callable[..., Any], tmp_path: Path) -> None:
    scenes = [[place, 1, "stop"] for place in PLACES]
    assert forked("commit_lost:lose_in_commit", str(tmp_path), scenes) == []


@pytest.mark.parametrize(
    "how",
    [
        "kill",
        pytest.param("stop", marks=pytest.mark.slow),
        pytest.param("interrupt", marks=pytest.mark.slow),
    ],
)
def test_the_coordinator(forked: Callable[..., Any], tmp_path: Path, how: str) -> None:
    scenes = [[place, 0, how] for place in PLACES]
    assert forked("commit_lost:lose_in_commit", str(tmp_path), scenes) == []
