"""Two jobs that save one checkpoint, readers while it is replaced, prune beside saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults_running.jobs import nothing_leaks
from tests.faults_running.jobs_at_once import race_in_threads


@pytest.mark.parametrize(("savers", "saves"), [(2, 25), (3, 10)])
def test_processes_save_one_checkpoint(
    forked: Callable[..., Any], memory_path: Path, savers: int, saves: int
) -> None:
    found = forked("jobs_at_once:race", str(memory_path), savers, saves)
    assert found["problems"] == []
    assert found["saved"] + found["refused"] == savers * saves and found["saved"] >= saves


def test_threads_save_one_checkpoint(memory_path: Path) -> None:
    with nothing_leaks():
        found = race_in_threads(memory_path / "checkpoint", 20)
    assert found["problems"] == []
    assert found["saved"] + found["refused"] == 40 and found["saved"] >= 20


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_while_it_is_replaced(
    forked: Callable[..., Any], memory_path: Path, ranks: int
) -> None:
    found = forked("jobs_at_once:read_beside", str(memory_path), ranks, 40)
    assert found["problems"] == []
    assert found["loads"] > 2


def test_prune_beside_saves(forked: Callable[..., Any], memory_path: Path) -> None:
    found = forked("jobs_at_once:prune_beside", str(memory_path), 40)
    assert found["problems"] == []
    assert found["prunes"] > 2


@pytest.mark.slow
def test_all_of_it_for_longer(forked: Callable[..., Any], memory_path: Path) -> None:
    for number, (name, *args) in enumerate(
        [["race", 4, 60], ["read_beside", 1, 300], ["read_beside", 2, 200], ["prune_beside", 300]]
    ):
        folder = memory_path / str(number)
        folder.mkdir()
        assert forked(f"jobs_at_once:{name}", str(folder), *args)["problems"] == []
