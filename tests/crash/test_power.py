"""The power is lost at any change; ``power.py`` says what a disk may hold then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash.power import Change, Disk, images
from tests.crash.scenes import STARTS
from tests.marks import slow

ALL = [(start, kind) for start in STARTS for kind in ("torch_save", "safetensors")]
FEW = [("nothing", "safetensors"), ("ours", "torch_save"), ("other", "safetensors")]
FEW += [slow("plain", "torch_save"), slow("half_committed", "torch_save")]


def check(crash: Callable[..., Any], *call: Any) -> None:
    found = crash(*call)
    assert found["problems"] == []
    assert found["images"] > 15


@pytest.mark.parametrize(("start", "serialization"), FEW)
def test_the_power_is_lost_in_a_save(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    check(crash, "blackout:lose_power", str(tmp_path), start, serialization)


@pytest.mark.slow
def test_the_power_is_lost_in_a_save_of_two_ranks(
    crash: Callable[..., Any], tmp_path: Path
) -> None:
    check(crash, "blackout:lose_power_of_ranks", str(tmp_path), "ours", "torch_save")


@pytest.mark.slow
def test_the_power_is_lost_after_a_save_that_was_killed_early(
    crash: Callable[..., Any], tmp_path: Path
) -> None:
    call = "blackout:lose_power_after_kills"
    check(crash, call, str(tmp_path), "nothing", "safetensors", 1, 3)


@pytest.mark.parametrize("changes", ["FailingDirectorySync", slow("FailingLastSync")])
def test_the_power_is_lost_after_a_sync_that_failed(
    crash: Callable[..., Any], tmp_path: Path, changes: str
) -> None:
    check(crash, "blackout:lose_power", str(tmp_path), "ours", "torch_save", changes)


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        slow("WithoutSync", "nothing"),
        ("WithoutSync", "ours"),
        ("WithoutDirectorySync", "nothing"),
        slow("WithoutDirectorySync", "ours"),
    ],
)
def test_a_save_that_does_not_sync_is_found_out(
    crash: Callable[..., Any], tmp_path: Path, changes: str, start: str
) -> None:
    assert crash("blackout:lose_power", str(tmp_path), start, "torch_save", changes)["problems"]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "serialization"), ALL)
def test_every_sync_of_a_file_is_needed(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    found = crash("blackout:need_of_syncs", str(tmp_path), start, serialization)
    # A marker that is lost with the power owns nothing, and one that is empty belongs to nobody.
    idle = {name for name, problems in found.items() if not problems and ".saving" not in name}
    names = {name for name in found if name.split()[1] == "sync_directory"}
    # Some of a directory are for other cases: it was there already, or has no `.metadata` to order.
    assert idle < names


@pytest.mark.slow
@pytest.mark.parametrize(("start", "serialization"), ALL)
def test_the_power_is_lost_anywhere(
    crash: Callable[..., Any], tmp_path: Path, start: str, serialization: str
) -> None:
    check(crash, "blackout:lose_power", str(tmp_path / "1"), start, serialization)
    check(crash, "blackout:lose_power_of_ranks", str(tmp_path / "2"), start, serialization)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["nothing", "ours", "plain"])
def test_the_power_is_lost_after_any_kill(
    crash: Callable[..., Any], tmp_path: Path, start: str
) -> None:
    call = "blackout:lose_power_after_kills"
    check(crash, call, str(tmp_path), start, "torch_save", 3, 100)


def names_after(log: list[Change]) -> set[frozenset[tuple[str, bytes]]]:
    """The files, with what is in them, of every image."""
    return {
        frozenset((path, content) for path, kind, content in image.entries if kind == "file")
        for _, _, image in images(Disk(), log)
    }


def test_the_model_loses_bytes_that_were_not_synced_and_keeps_those_that_were() -> None:
    create, write = Change("create", "a", 1), Change("write", file=1, data=b"xy")
    sync, sync_directory = Change("sync", file=1), Change("sync_directory")
    nothing: frozenset[tuple[str, bytes]] = frozenset()
    empty, zeros, whole = (frozenset({("a", text)}) for text in (b"", b"\0\0", b"xy"))
    assert names_after([create, write]) == {nothing, empty, zeros, whole}
    # The bytes are safe, the name is not; then the other way round.
    assert names_after([create, sync_directory, write]) == {nothing, empty, zeros, whole}
    assert names_after([create, write, sync, sync_directory]) >= {nothing, whole}
    last = [
        i.entries for n, _, i in images(Disk(), [create, write, sync, sync_directory]) if n == 4
    ]
    assert last == [frozenset({("", "directory", b""), ("a", "file", b"xy")})]


def test_the_model_reorders_the_names_of_a_directory() -> None:
    log = [Change("create", "a", 1), Change("create", "b", 2), Change("sync_directory")]
    log += [Change("replace", "c", source="a"), Change("replace", "d", source="b")]
    found = {frozenset(name for name, _ in image) for image in names_after(log)}
    assert found == {frozenset(names) for names in ("", "a", "b", "ab", "cb", "ad", "cd")}
