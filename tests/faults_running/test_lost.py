"""A rank is lost in the middle: the others end in time, name it, and nothing has changed."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

SAVE = ["agree", "write", "commit", "create", "write", "symlink"]
LOAD = ["open", "agree", "share", "read", "settle", "apply"]
HOW = ["kill", "stop", "cut"]


def test_lost_in_a_save(forked: Callable[..., Any], tmp_path: Path) -> None:
    scenes = [
        ["save", "agree", 1, "kill"],
        ["save", "write", 1, "stop"],
        ["save", "write", 0, "kill"],
        ["save", "commit", 0, "stop"],
        ["save", "commit", 1, "cut"],
    ]
    assert forked("lost:lose", str(tmp_path), scenes) == []


def test_lost_in_a_load(forked: Callable[..., Any], tmp_path: Path) -> None:
    scenes = [
        ["load", "open", 1, "kill"],
        ["load", "agree", 0, "stop"],
        ["load", "share", 1, "stop"],
        ["load", "read", 0, "kill"],
        ["load", "settle", 1, "stop"],
        ["load", "settle", 0, "cut"],
        ["load", "apply", 1, "kill"],
    ]
    assert forked("lost:lose", str(tmp_path), scenes) == []


def test_lost_while_bytes_are_passed_on(forked: Callable[..., Any], tmp_path: Path) -> None:
    once = {"read_replicas": "once"}
    scenes = [["load", "read", victim, how, "file", once] for victim, how in product((0, 1), HOW)]
    assert forked("lost:lose", str(tmp_path), scenes) == []


def test_lost_with_the_store(forked: Callable[..., Any], tmp_path: Path) -> None:
    scenes = [
        [graph, place, 0, how, "host"]
        for graph, place in (("save", "write"), ("load", "settle"))
        for how in ("kill", "stop")
    ]
    assert forked("lost:lose", str(tmp_path), scenes) == []


@pytest.mark.slow
@pytest.mark.parametrize("store", ["file", "host"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("victim", [0, 1])
def test_lost_anywhere(
    forked: Callable[..., Any], tmp_path: Path, victim: int, how: str, store: str
) -> None:
    changes = ["create", "reserve", "sync"] + ["symlink"] * (victim == 0)
    saves = [
        ["save", place, victim, how, store] for place in ("agree", "write", "commit", *changes)
    ]
    loads = [
        ["load", place, victim, how, store, config]
        for place in LOAD
        for config in ({}, {"rollback": "verify_first"})
    ]
    for number, scenes in enumerate((saves, loads[::2], loads[1::2])):
        (tmp_path / str(number)).mkdir()
        assert forked("lost:lose", str(tmp_path / str(number)), scenes) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_host_of_the_store_is_lost_before_they_met(
    forked: Callable[..., Any], tmp_path: Path, how: str
) -> None:
    assert forked("host_lost:lose_host", str(tmp_path), how) == []
