"""Saves whose log is played back with the power lost after each change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.crash import recording, saves
from tests.crash.forks import fork
from tests.crash.power import Change, Disk, images
from tests.crash.recording import RecordingChanges, read_log
from tests.crash.scenes import SECONDS, Before, Scene, problems_after

__all__ = ["lose_power", "need_of_syncs"]


def record(before: Before, root: Path, world_size: int, changes: str) -> list[Change]:
    """The log of a save of generation 2 over a scene; ``changes`` names the class."""
    top = root / "recorded"
    shutil.rmtree(top, ignore_errors=True)
    saves.copy(before.path, top / "checkpoint")
    top.mkdir(exist_ok=True)
    kind: type[RecordingChanges] = getattr(recording, changes)
    log, path, serialization = root / "log", top / "checkpoint", before.scene.serialization
    log.unlink(missing_ok=True)

    def work(rank: int) -> None:
        made = kind(log, top)
        if world_size == 1:
            saves.save(path, 2, serialization, made)
        else:
            saves.save_as_rank(rank, root / "meeting", path, 2, serialization, made)

    forks = [fork(lambda rank=rank: work(rank)) for rank in range(world_size)]  # type: ignore[misc]
    ends = [one.wait(SECONDS) for one in forks]
    assert all(ended.how == "ok" for ended in ends), ends
    return read_log(log)


def lose_power(
    root: str,
    start: str,
    serialization: str,
    world_size: int = 1,
    changes: str = "RecordingChanges",
    is_lazy: bool = False,
) -> dict[str, Any]:
    """Check every image that a loss of power may leave; ``is_lazy`` stops at the first problem."""
    folder = Path(root)
    before = Before.of(Scene(start, serialization), folder / "before" / "checkpoint")
    log = record(before, folder, world_size, changes)
    count, problems = _check(before, log, folder, is_lazy)
    return {"changes": len(log), "images": count, "problems": problems}


def need_of_syncs(root: str, start: str, serialization: str) -> dict[str, list[str]]:
    """What goes wrong when one sync of a save is left out, for each of them in turn."""
    folder = Path(root)
    before = Before.of(Scene(start, serialization), folder / "before" / "checkpoint")
    log = record(before, folder, 1, "RecordingChanges")
    names = {change.file: change.path for change in log if change.method == "create"}
    found: dict[str, list[str]] = {}
    for number, change in enumerate(log):
        if change.method in ("sync", "sync_directory"):
            shorter = [other for n, other in enumerate(log) if n != number]
            name = f"{number} {change.method} {names.get(change.file, change.path)}"
            found[name] = _check(before, shorter, folder, is_lazy=True)[1]
    return found


def _check(before: Before, log: list[Change], root: Path, is_lazy: bool) -> tuple[int, list[str]]:
    top, count, problems = root / "after", 0, []
    disk = Disk.holding(before.path.parent) if before.path.parent.exists() else Disk()
    for number, unsynced, image in images(disk, log):
        shutil.rmtree(top, ignore_errors=True)
        top.mkdir()
        image.write(top)
        count += 1
        last = f"{log[number - 1].method} {log[number - 1].path}" if number else "nothing"
        for problem in problems_after(before, top / "checkpoint"):
            problems.append(f"after {number} ({last}), bytes {unsynced}: {problem}")
        if problems and is_lazy:
            break
    return count, problems
