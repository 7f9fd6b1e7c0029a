"""A save killed at every change that it makes, in turn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.crash import saves
from tests.crash.changes import HALVED, CountedChanges, Made, Stop
from tests.crash.forks import Ended, fork
from tests.crash.scenes import SECONDS, Before, Scene, problems_after, problems_of_prune

__all__ = ["kill_alone", "kill_ranks"]

MARKER_REMOVED: Made = ("remove", ".saving-*.json")
"""What the coordinator does once all ranks know that the save is committed."""


def stops(made: list[Made], is_full: bool) -> list[Stop]:
    """Where to end a save: before and halfway through every change, and after.

    What lies on the disk after a change is what lies there before the next one, so where
    ``is_full`` is not asked for, only one change of each kind is stopped after, and the last.
    """
    last = {method: number for number, (method, _) in enumerate(made)}
    found = [Stop(number, "before") for number in range(len(made))]
    found += [Stop(n, "halfway") for n, (method, _) in enumerate(made) if method in HALVED]
    after = range(len(made)) if is_full else sorted({*last.values(), len(made) - 1})
    return found + [Stop(number, "after") for number in after]


def kill_alone(
    root: str, start: str, serialization: str, step: int, is_full: bool, is_pruned: bool = False
) -> dict[str, Any]:
    """Kill a save of one process at every ``step``-th change, and at all that belong to the commit.

    What was tried, which kinds of change the save makes, and what was wrong.
    """
    before = Before.of(Scene(start, serialization), Path(root, "before", "checkpoint"))
    path = Path(root, "killed", "checkpoint")

    def run(stop: Stop | None) -> Ended:
        shutil.rmtree(path.parent, ignore_errors=True)
        saves.copy(before.path, path)

        def work() -> list[Made]:
            changes = CountedChanges(stop)
            saves.save(path, 2, serialization, changes)
            return changes.made

        return fork(work).wait(SECONDS)

    whole = run(None)
    made = [(method, name) for method, name in whole.value]
    points, problems = [], [f"not killed: {p}" for p in problems_after(before, path, True)]
    for stop in (stop for stop in stops(made, is_full) if is_due(stop, made, step)):
        ended = run(stop)
        point = (stop.when, *made[stop.number])
        points.append(point)
        if ended.how != "killed":
            problems.append(f"{point}: ended by {ended}")
        check = problems_of_prune if is_pruned else problems_after
        problems += [f"{point}: {problem}" for problem in check(before, path)]
    return {"kinds": sorted({method for method, _ in made}), "points": points, "problems": problems}


def kill_ranks(
    root: str, start: str, serialization: str, rank: int, step: int, is_full: bool
) -> dict[str, Any]:
    """Kill one rank of two at every ``step``-th change, and at all that belong to the commit.

    ``in_doubt`` counts the kills after which the other rank was left with an error although the
    checkpoint was committed: it must not have deleted what it had written.
    """
    before = Before.of(Scene(start, serialization), Path(root, "before", "checkpoint"))
    path = Path(root, "killed", "checkpoint")
    turns = iter(range(10_000))

    def run(stop: Stop | None) -> list[Ended]:
        shutil.rmtree(path.parent, ignore_errors=True)
        saves.copy(before.path, path)
        meeting = Path(root, f"meeting-{next(turns)}")

        def work(own: int) -> list[Made]:
            changes = CountedChanges(stop if own == rank else None)
            saves.save_as_rank(own, meeting, path, 2, serialization, changes)
            return changes.made

        forks = [fork(lambda own=own: work(own)) for own in range(2)]  # type: ignore[misc]
        return [one.wait(SECONDS) for one in forks]

    whole = run(None)
    assert [ended.how for ended in whole] == ["ok", "ok"], whole
    made = [(method, name) for method, name in whole[rank].value]
    points, problems = [], [f"not killed: {p}" for p in problems_after(before, path, True)]
    in_doubt = 0
    chosen = [stop for stop in stops(made, is_full) if is_due(stop, made, step)]
    for stop in chosen:
        ended = run(stop)
        point = (stop.when, *made[stop.number])
        points.append(point)
        survivor = ended[1 - rank]
        if ended[rank].how != "killed":
            problems.append(f"{point}: ended by {ended[rank]}")
        # All that comes before the coordinator's last word leaves the other rank in the dark.
        may_succeed = made[stop.number] == MARKER_REMOVED
        is_told = survivor.how == "error" and "CheckpointError" in survivor.error
        if not is_told and not (may_succeed and survivor.how == "ok"):
            problems.append(f"{point}: the other rank ended by {survivor}")
        in_doubt += survivor.how == "error" and is_committed(path, before.path)
        problems += [f"{point}: {problem}" for problem in problems_after(before, path)]
    return {"points": points, "problems": problems, "in_doubt": in_doubt}


def is_committed(path: Path, before: Path) -> bool:
    """Whether the commit record is another than before."""
    records = [folder / "manifest.json" for folder in (path, before)]
    texts = [record.read_bytes() if record.exists() else None for record in records]
    return texts[0] != texts[1]


def is_due(stop: Stop, made: list[Made], step: int) -> bool:
    """Whether a stop is among those that are tried; the commit always is.

    After a change lies on the disk what lies there before the next.
    """
    if step > 1 and stop.when == "after" and stop.number < len(made) - 1:
        return False
    names = [name for _, name in made]
    is_commit = ".committing.lock" in names and stop.number >= names.index(".committing.lock")
    return is_commit or stop.number % step == 0
