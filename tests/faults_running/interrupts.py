"""Saves and loads that Ctrl-C interrupts, each somewhere else."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dcp_pipeline.core.errors import CoordinationError
from dcp_pipeline.graph.node import Node
from dcp_pipeline.storage.base import Source
from dcp_pipeline.storage.file_directory import FileSystemDirectory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.equal import assert_same
from tests.faults_running.disk import counted
from tests.faults_running.faulty import Fault, FaultyChanges
from tests.faults_running.jobs import (
    check_loads,
    left_over,
    listing,
    my_rank,
    pipeline_of,
    several_files,
    state_of,
    template,
)
from tests.faults_running.lost import LOAD_PLACES, SAVE_PLACES

__all__ = ["interrupt_commits", "interrupt_loads", "interrupt_ranks", "interrupt_saves"]

QUICKLY = 12.0
"""Far less than the time-out of the ranks, for a machine that is busy."""


@contextmanager
def _ctrl_c_works() -> Iterator[None]:
    """Also in a process that was started in the background, where the signal is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    # In another thread than the main one nothing happens to the caller.
    time.sleep(0.01)


def interruption_of(action: Callable[[], Any]) -> KeyboardInterrupt | None:
    try:
        action()
    except KeyboardInterrupt as error:
        return error
    return None


def interrupt_saves(root: Path, step: int = 1) -> list[str]:
    """Interrupt a save over another at every ``step``-th change; what was wrong."""
    old, path, elsewhere = root / "old", root / "checkpoint", root / "elsewhere"
    with several_files(), pipeline_of() as pipeline:
        pipeline.save(state_of(1), old)
    shutil.copytree(old, path)
    count = len(counted(path))
    problems = []
    for number in range(0, count, step):
        shutil.rmtree(path)
        shutil.copytree(old, path)
        before = listing(path)
        changes = FaultyChanges(Fault(number, 0), ctrl_c)
        with _ctrl_c_works(), several_files(), pipeline_of(changes) as pipeline:
            if interruption_of(lambda: pipeline.save(state_of(2), path)) is None:
                problems.append(f"{number}: not interrupted")
            changes.fault = None
            is_new = _record(path) != _record(old)
            if not is_new and listing(path) != before:
                problems.append(f"{changes.made[number]}: left {listing(path)}")
            check_loads(path, 2 if is_new else 1)
            for place in (elsewhere, path):
                pipeline.save(state_of(3), place)
                check_loads(place, 3)
                if left_over(place):
                    problems.append(f"{changes.made[number]}: next leaves {left_over(place)}")
    return problems


def _record(path: Path) -> bytes:
    return (path / "manifest.json").read_bytes()


class _InterruptedReads(FileSystemStorage):
    """Interrupts the read of a number."""

    def __init__(self, number: int) -> None:
        super().__init__(thread_count=2, buffer_bytes=32 << 10)
        self.left = number

    def open(self, checkpoint_id: str) -> FileSystemDirectory:
        directory = super().open(checkpoint_id)
        real = directory.open

        def open_source(name: str) -> Source:
            source = real(name)
            read_into = source.read_into

            def read(offset: int, target: memoryview) -> None:
                self.left -= 1
                if self.left == -1:
                    ctrl_c()
                read_into(offset, target)

            source.read_into = read  # type: ignore[method-assign]
            return source

        directory.open = open_source  # type: ignore[method-assign]
        return directory


class _Held:
    """A ``Stateful`` that is interrupted when it has taken half of its state."""

    def __init__(self) -> None:
        self.values = [0, 0]
        self.is_armed = False

    def state_dict(self) -> dict[str, Any]:
        return {"one": self.values[0], "other": self.values[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values[0] = state_dict["one"]
        if self.is_armed:
            self.is_armed = False
            ctrl_c()
        self.values[1] = state_dict["other"]


def interrupt_loads(root: Path, rollback: str) -> list[str]:
    """Interrupt a load at every read and in an object of the user; what was wrong."""
    held = _Held()
    held.values = [5, 6]
    with several_files(), pipeline_of() as pipeline:
        pipeline.save(state_of(1) | {"held": held}, root)
    held.values = [0, 0]
    problems = []
    number = 0
    while True:
        storage = _InterruptedReads(number)
        state = template() | {"held": held}
        with (
            _ctrl_c_works(),
            pipeline_of(None, {"rollback": rollback}, storage=storage) as pipeline,
        ):
            held.is_armed = number == 0
            error = interruption_of(lambda: pipeline.load(state, root))  # noqa: B023
        if error is None:
            break
        if held.values != [0, 0]:
            problems.append(f"read {number}: the object has {held.values}")
        del state["held"]
        # Read again, and nothing was kept: the error says so.
        is_torn = any("could not be undone" in note for note in getattr(error, "__notes__", ()))
        if not (is_torn and rollback == "verify_first"):
            assert_same(state, template())
        number += 1
        if number == 1:
            # The object comes after all reads.
            storage.left = 1 << 30
    if number < 2 or held.values != [5, 6]:
        problems.append(f"{number} interruptions, then {held.values}")
    return problems


def interrupt_ranks(root: Path, rank: int) -> list[str]:
    """Interrupt one rank at every node of a save and of a load; what was wrong on this rank."""
    path = root / "checkpoint"
    with pipeline_of() as pipeline:
        pipeline.save(state_of(1), path)
    problems = []
    for graph, places in (("save", SAVE_PLACES), ("load", LOAD_PLACES)):
        for name, value in places.items():
            node = Node("ctrl-c", lambda **values: ctrl_c(), (value,))
            nodes = {f"{graph}_nodes": (node,) if my_rank() == rank else ()}
            with _ctrl_c_works(), pipeline_of(**nodes) as pipeline:  # type: ignore[arg-type]
                found = _interrupted_together(graph, pipeline, path, rank)
            problems += [f"{graph} {name}: {problem}" for problem in found]
    return problems


def interrupt_commits(root: Path, rank: int, step: int) -> list[str]:
    """Interrupt one rank at every ``step``-th change of its save; what was wrong on this rank."""
    path = root / "checkpoint"
    with several_files(), pipeline_of() as pipeline:
        pipeline.save(state_of(1), path)
    count = [len(counted(path))]
    dist.broadcast_object_list(count, rank)
    problems = []
    for number in range(0, count[0], step):
        changes = FaultyChanges(Fault(number, 0) if my_rank() == rank else None, ctrl_c)
        with _ctrl_c_works(), several_files(), pipeline_of(changes) as pipeline:
            found = _interrupted_together("save", pipeline, path, rank)
            # Whether it came to this change at all is only known afterwards.
            found = list(found)
        if my_rank() != rank or number < len(changes.made):
            problems += [f"{number} {changes.made[-1]}: {problem}" for problem in found]
    return problems


def _interrupted_together(graph: str, pipeline: Any, path: Path, rank: int) -> Iterator[str]:
    with several_files(), pipeline_of() as plainly:
        plainly.save(state_of(1), path)
    dist.barrier()
    state, started = template(), time.monotonic()
    error: BaseException | None = None
    try:
        if graph == "save":
            pipeline.save(state_of(2), path)
        else:
            pipeline.load(state, path)
    except (KeyboardInterrupt, CoordinationError) as raised:
        error = raised
    seconds = time.monotonic() - started
    ends: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ends, type(error).__name__)
    if seconds > QUICKLY:
        yield f"it took {seconds:.1f} s"
    if my_rank() == rank and not isinstance(error, KeyboardInterrupt):
        yield f"{error!r}"
    # Where all was decided, the other rank may have got through.
    if my_rank() != rank and error is not None and f"rank {rank} was lost" not in str(error):
        yield f"it says {error}"
    if graph == "load" and error is not None:
        assert_same(state, template())
    if my_rank() != rank and error is None and graph == "load":
        yield "the other rank has loaded"
    with pipeline_of() as again:
        generation = _generation(path)
        if generation != 2 and any(end == "NoneType" for end in ends):
            yield f"it returned, but the directory has generation {generation}"
        again.save(state_of(3), path.parent / "elsewhere")
        check_loads(path.parent / "elsewhere", 3)
        again.save(state_of(4), path)
        dist.barrier()
        if left_over(path):
            yield f"the next save leaves {left_over(path)}"
        dist.barrier()


def _generation(path: Path) -> int:
    state = template()
    with pipeline_of() as pipeline:
        pipeline.load(state, path)
    assert_same(state, state_of(state["step"]))
    return int(state["step"])
