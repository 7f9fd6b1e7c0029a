"""Ctrl-C at any point: it comes out, the others hear of it, nothing is left behind."""

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.faults_running.interrupt_lines import (
    interrupt_loads_at_lines,
    interrupt_saves_at_lines,
)
from tests.faults_running.interrupts import (
    interrupt_commits,
    interrupt_loads,
    interrupt_ranks,
    interrupt_saves,
)
from tests.faults_running.jobs import nothing_leaks


def test_a_save_at_every_change(memory_path: Path) -> None:
    with nothing_leaks():
        assert interrupt_saves(memory_path) == []


@pytest.mark.parametrize("rollback", ["copy", "verify_first"])
def test_a_load_at_every_read(tmp_path: Path, rollback: str) -> None:
    with nothing_leaks():
        assert interrupt_loads(tmp_path, rollback) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_at_every_node(ranks: Pool, memory_path: Path, rank: int) -> None:
    assert ranks(2).run(interrupt_ranks, memory_path, rank, seconds=120.0) == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_at_some_changes(ranks: Pool, memory_path: Path, rank: int) -> None:
    found = ranks(2).run(interrupt_commits, memory_path, rank, 8, seconds=120.0)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_at_every_change(ranks: Pool, memory_path: Path, rank: int) -> None:
    assert ranks(2).run(interrupt_commits, memory_path, rank, 1, seconds=280.0) == [[], []]


def test_a_save_between_some_lines_leaves_nothing(memory_path: Path) -> None:
    assert interrupt_saves_at_lines(memory_path, 149) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6))
def test_a_save_between_any_two_lines_leaves_nothing(memory_path: Path, first: int) -> None:
    assert interrupt_saves_at_lines(memory_path, 6, first) == []


def test_a_load_between_some_lines_leaves_nothing(memory_path: Path) -> None:
    assert interrupt_loads_at_lines(memory_path, 19) == []


@pytest.mark.slow
def test_a_load_between_any_two_lines_leaves_nothing(memory_path: Path) -> None:
    assert interrupt_loads_at_lines(memory_path, 1) == []
