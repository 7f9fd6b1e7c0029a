"""Saves in which one change to the file system fails, each in turn."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.core.errors import UnfinishedCommitError
from tests.faults_running.faulty import SPACE_CODES, TAKES_SPACE, Fault, FaultyChanges, Made
from tests.faults_running.jobs import (
    check_loads,
    left_over,
    listing,
    my_rank,
    nothing_leaks,
    pipeline_of,
    several_files,
    state_of,
)

__all__ = ["counted", "problems_of_error", "problems_on_ranks", "problems_with"]

COMMIT: Made = ("replace", "manifest.json")
NEEDS_ROOM = ("create", "reserve", "write", "symlink", "sync")


def counted(path: Path) -> list[Made]:
    """The changes that a save over a checkpoint at ``path`` makes on this rank."""
    changes = FaultyChanges()
    with several_files(), pipeline_of(changes) as pipeline:
        pipeline.save(state_of(2), path)
    return changes.made


def problems_with(
    old: Path, work: Path, faults: Iterable[Fault], may_leave: bool = False
) -> list[str]:
    """Save over a copy of ``old`` (which may be missing) with each fault; what was wrong.

    After a save that raised there is what was there before, and not a file more; after one that
    returned, the new checkpoint. Either way the same pipeline saves elsewhere at once, and the next
    save into the same directory leaves nothing but itself.
    """
    problems = []
    for fault in faults:
        path = work / f"{fault.number}-{fault.code}-{fault.is_done}" / "checkpoint"
        path.parent.mkdir(parents=True)
        if old.exists():
            shutil.copytree(old, path)
        problems += [f"{fault}: {problem}" for problem in _try(path, fault, may_leave)]
        shutil.rmtree(path.parent)
    return problems


def _try(path: Path, fault: Fault, may_leave: bool) -> Iterable[str]:
    before = listing(path)
    changes = FaultyChanges(fault)
    with several_files(), pipeline_of(changes) as pipeline:
        error: Exception | None = None
        try:
            pipeline.save(state_of(2), path)
        except Exception as raised:
            error = raised
        changes.fault = None
        if len(changes.made) <= fault.number:
            return  # a thread wrote in other pieces than when it was counted
        where = changes.made[fault.number]
        if error is None:
            if COMMIT not in changes.made[: fault.number + fault.is_done] and not _harmless(
                where, fault
            ):
                yield f"{where}: the save returned"
            yield from _wrong(where, lambda: check_loads(path, 2))
        else:
            yield from (
                f"{where}: {problem}" for problem in problems_of_error(error, fault, path, where)
            )
            if isinstance(error, UnfinishedCommitError):
                if COMMIT not in changes.made[: fault.number + fault.is_done]:
                    yield f"{where}: nothing was committed yet"
                yield from _unfinished(path, before)
            elif listing(path) != before and not may_leave:
                yield f"{where}: it left {set(listing(path)) ^ set(before)}"
            elif before:
                yield from _wrong(where, lambda: check_loads(path, 1))
        for number, target in enumerate((path.parent / "elsewhere", path)):
            try:
                pipeline.save(state_of(3 + number), target)
                check_loads(target, 3 + number)
                if left_over(target):
                    yield f"{where}: the next save leaves {left_over(target)}"
            except Exception as raised:
                yield f"{where}: the next save: {raised!r}"


def problems_on_ranks(root: Path, rank: int, codes: list[int], step: int) -> tuple[list[str], int]:
    """As :func:`problems_with` on all ranks, with the faults on one; with the number of saves.

    What was wrong is what this rank saw. The counts differ: only the coordinator commits.
    """
    path = root / "checkpoint"
    with several_files(), pipeline_of() as pipeline:
        pipeline.save(state_of(1), path)
    count = _agreed(len(counted(path)), rank)
    problems: list[str] = []
    tried = range(0, count, step)
    with nothing_leaks():
        for turn, number in enumerate(tried):
            code = codes[turn % len(codes)]
            fault = Fault(number, code, lasting=TAKES_SPACE if code in SPACE_CODES else ())
            problems += [f"{fault}: {problem}" for problem in _try_on_ranks(path, fault, rank)]
    return problems, len(tried)


def _agreed(number: int, rank: int) -> int:
    tensor = torch.tensor([number])
    dist.broadcast(tensor, rank)
    return int(tensor)


def _try_on_ranks(path: Path, fault: Fault, rank: int) -> Iterable[str]:
    with pipeline_of() as pipeline:
        pipeline.save(state_of(1), path)
    dist.barrier()
    before = listing(path)
    changes = FaultyChanges(fault if my_rank() == rank else None)
    with several_files(), pipeline_of(changes) as pipeline:
        error: Exception | None = None
        try:
            pipeline.save(state_of(2), path)
        except Exception as raised:
            error = raised
        changes.fault = None
        dist.barrier()
        if error is not None:
            yield from problems_of_error(error, fault, path, None, rank)
            if isinstance(error, UnfinishedCommitError):
                yield from _unfinished(path, before)
            elif listing(path) != before:
                yield f"it left {set(listing(path)) ^ set(before)}"
        generation = 1 if error and not isinstance(error, UnfinishedCommitError) else 2
        if _agreed(generation, rank) != generation:
            yield f"only one of the ranks raised: {error!r}"
        yield from _wrong(("load", ""), lambda: check_loads(path, generation))
        pipeline.save(state_of(3), path.parent / "elsewhere")
        yield from _wrong(("elsewhere", ""), lambda: check_loads(path.parent / "elsewhere", 3))


def _unfinished(path: Path, before: list[str]) -> Iterable[str]:
    """What is wrong after a commit whose end failed: the new one is there, and all of the old."""
    yield from _wrong(("unfinished", ""), lambda: check_loads(path, 2))
    if not set(before) <= set(listing(path)):
        yield f"it deleted {set(before) - set(listing(path))}"


def _harmless(where: Made, fault: Fault) -> bool:
    """Whether a save may go on after a fault before its commit."""
    method, name = where
    # A directory that this process may not open is made durable by who has made it.
    return method == "sync_directory" and fault.code == errno.EACCES and not name.startswith("__")


def problems_of_error(
    error: BaseException, fault: Fault, path: Path, where: Made | None = None, rank: int = 0
) -> Iterable[str]:
    """What is wrong with the error of a save, which ``where`` on ``rank`` has failed."""
    if not isinstance(error, OSError):
        yield f"it raised {type(error).__mro__}: {error}"
        return
    text = str(error)
    if error.errno != fault.code:
        yield f"errno {error.errno}: {text}"
    if not str(getattr(error, "filename", None)).startswith(os.fspath(path.parent)):
        yield f"filename {error.filename}: {text}"
    wanted = [f"rank {rank}", errno.errorcode[fault.code], str(path.parent)]
    if fault.code in SPACE_CODES and where is not None and where[0] in NEEDS_ROOM:
        wanted += ["bytes wanted", "free in"]
    yield from (f"{word!r} is not in: {text}" for word in wanted if word not in text)


def _wrong(where: Made, action: Callable[[], Any]) -> Iterable[str]:
    try:
        action()
    except Exception as raised:
        yield f"{where}: {raised!r}"
