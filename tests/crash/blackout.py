"""Saves whose log is played back with the power lost after each change."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dcp_pipeline.tools.prune import prune
from tests.crash import recording, saves
from tests.crash.forks import fork
from tests.crash.power import Change, Disk, images
from tests.crash.recording import RecordingChanges, read_log
from tests.crash.scenes import SECONDS, Before, Scene, problems_after

__all__ = ["lose_power", "lose_power_after_kills", "lose_power_of_ranks", "need_of_syncs"]


def record(before: Before, root: Path, changes: str, kills: Sequence[int] = (-1,)) -> list[Change]:
    """The log of saves of generation 2 over a scene by one process, one after the other.

    Args:
        changes: the name of the class that makes the changes.
        kills: after how many changes each save is killed; -1 for one that is not.
    """
    top, log = _start(before, root), root / "log"
    kind: type[RecordingChanges] = getattr(recording, changes)
    for stop_after in kills:

        def work(stop_after: int = stop_after) -> None:
            made = kind(log, top, stop_after)
            saves.save(top / "checkpoint", 2, before.scene.serialization, made)

        ended = fork(work).wait(SECONDS)
        may_say_so = changes.startswith("Failing") and "UnfinishedCommitError" in str(ended.error)
        assert may_say_so or ended.how == ("ok" if stop_after < 0 else "killed"), ended
    return read_log(log)


def record_prune(before: Before, root: Path, stop_after: int) -> list[Change]:
    """The log of a save that is killed after some changes, and of ``prune`` after it."""
    record(before, root, "RecordingChanges", (stop_after,))
    top, log = root / "recorded", root / "log"
    ended = fork(lambda: bool(prune(top, changes=RecordingChanges(log, top)))).wait(SECONDS)
    assert ended.how == "ok", ended
    return read_log(log)


def record_ranks(before: Before, root: Path) -> list[Change]:
    """The log of a save of generation 2 by two ranks."""
    top, log = _start(before, root), root / "log"

    def work(rank: int) -> None:
        made = RecordingChanges(log, top)
        serialization = before.scene.serialization
        saves.save_as_rank(rank, root / "meeting", top / "checkpoint", 2, serialization, made)

    forks = [fork(lambda rank=rank: work(rank)) for rank in range(2)]  # type: ignore[misc]
    ends = [one.wait(SECONDS) for one in forks]
    assert all(ended.how == "ok" for ended in ends), ends
    return read_log(log)


def _start(before: Before, root: Path) -> Path:
    top = root / "recorded"
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True)
    saves.copy(before.path, top / "checkpoint")
    (root / "log").unlink(missing_ok=True)
    return top


def lose_power(
    root: str, start: str, serialization: str, changes: str = "RecordingChanges"
) -> dict[str, Any]:
    """Check every image that a loss of power may leave of a save by one process.

    One problem is enough to tell that a class forgets something. Where the disk reports an error,
    the save says so, and may be lost.
    """
    folder, before = _before(root, start, serialization)
    log = record(before, folder, changes)
    is_lazy, may_fail = changes.startswith("Without"), changes.startswith("Failing")
    count, problems = _check(before, log, folder, is_lazy, may_fail)
    return {"changes": len(log), "images": count, "problems": problems}


def lose_power_of_ranks(root: str, start: str, serialization: str) -> dict[str, Any]:
    """The same of a save by two ranks on one machine."""
    folder, before = _before(root, start, serialization)
    log = record_ranks(before, folder)
    count, problems = _check(before, log, folder)
    return {"changes": len(log), "images": count, "problems": problems}


def lose_power_after_kills(
    root: str, start: str, serialization: str, step: int, end: int
) -> dict[str, Any]:
    """The same of a save that follows one that was killed, after every ``step``-th change of it."""
    folder, before = _before(root, start, serialization)
    whole = record(before, folder, "RecordingChanges")
    images, problems = 0, []
    for stop_after in range(1, min(end, len(whole)), step):
        log = record(before, folder, "RecordingChanges", (stop_after, -1))
        count, found = _check(before, log, folder)
        images += count
        problems += [f"killed after {stop_after}, {problem}" for problem in found]
    return {"images": images, "problems": problems}


def lose_power_after_prune(root: str, start: str, serialization: str) -> dict[str, Any]:
    """Of a save that is killed right after the replacement of the record, and of ``prune``."""
    folder, before = _before(root, start, serialization)
    whole = record(before, folder, "RecordingChanges")
    at = [n for n, change in enumerate(whole) if change.path.endswith("/manifest.json")][-1]
    count, problems = _check(before, record_prune(before, folder, at + 1), folder, may_fail=True)
    return {"images": count, "problems": problems}


def need_of_syncs(root: str, start: str, serialization: str) -> dict[str, list[str]]:
    """What goes wrong when one sync of a save is left out, for each of them in turn."""
    folder, before = _before(root, start, serialization)
    log = record(before, folder, "RecordingChanges")
    names = {change.file: change.path for change in log if change.method == "create"}
    found: dict[str, list[str]] = {}
    for number, change in enumerate(log):
        if change.method in ("sync", "sync_directory"):
            shorter = [other for n, other in enumerate(log) if n != number]
            name = f"{number} {change.method} {names.get(change.file, change.path)}"
            found[name] = _check(before, shorter, folder, is_lazy=True)[1]
    return found


def _before(root: str, start: str, serialization: str) -> tuple[Path, Before]:
    folder = Path(root)
    return folder, Before.of(Scene(start, serialization), folder / "before" / "checkpoint")


def _check(
    before: Before, log: list[Change], root: Path, is_lazy: bool = False, may_fail: bool = False
) -> tuple[int, list[str]]:
    top, count, problems = root / "after", 0, []
    disk = Disk.holding(before.path.parent) if before.path.parent.exists() else Disk()
    for number, unsynced, image in images(disk, log):
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        image.write(top)
        count += 1
        is_done = number == len(log) and not may_fail
        last = f"{log[number - 1].method} {log[number - 1].path}" if number else "nothing"
        for problem in problems_after(before, top / "checkpoint", is_done):
            problems.append(f"after {number} ({last}), bytes {unsynced}: {problem}")
        if problems and is_lazy:
            break
    return count, problems
