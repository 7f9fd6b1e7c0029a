"""Ranks that are killed, stopped or cut off in the middle of a save or a load."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from dcp_pipeline.core.errors import CoordinationError, RollbackFailedError
from dcp_pipeline.graph.node import Node
from tests.crash.forks import Fork, fork
from tests.equal import assert_same
from tests.faults_running.faulty import Fault, FaultyChanges
from tests.faults_running.jobs import (
    check_loads,
    left_over,
    pipeline_of,
    several_files,
    state_of,
    template,
)

__all__ = ["LOAD_PLACES", "SAVE_PLACES", "lose"]

WORLD = 3
TIMEOUT = 4.0
SPARE = 8.0
"""For a machine that is busy with many of these at a time."""

SAVE_PLACES = {"agree": "local_plan", "write": "share", "commit": "receipt"}
"""Node to the value that makes the graph stop right before it."""

LOAD_PLACES = {
    "open": "template",
    "agree": "match",
    "share": "differences",
    "read": "plan",
    "settle": "fetched",
    "apply": "settled",
}


@dataclass(frozen=True)
class Scene:
    """Who is lost, where, and how.

    Attributes:
        graph: ``save`` or ``load``.
        place: a node, right before which it happens; or the first change of a save that is so
            called, as ``symlink``, in the middle of a node.
        victim: the rank; 0 coordinates.
        how: ``kill``, ``stop``, or ``cut``: its connections end and it lives on.
        store: where the ranks meet: a ``file``, or rank 0 serves as a ``host``.
        config: of the pipeline.
    """

    graph: str
    place: str
    victim: int
    how: str
    store: str = "file"
    config: dict[str, Any] | None = None


def lose(root: str, scenes: list[list[Any]]) -> list[str]:
    """Play all scenes at a time, since they mostly wait; what was wrong."""
    old = Path(root, "old")
    end = fork(lambda: save_all_of(old)).wait(60)
    assert end.how == "ok", end
    played = []
    for number, values in enumerate(scenes):
        scene, folder = Scene(*values), Path(root, str(number))
        shutil.copytree(old, folder / "checkpoint")
        played.append((scene, folder, _start(scene, folder)))
    problems = []
    for scene, folder, ranks in played:
        problems += [f"{scene}: {problem}" for problem in _problems(scene, folder, ranks)]
    return problems


def save_all_of(path: Path) -> None:
    """One process saves what the ranks hold together."""
    state = {key: value for rank in range(WORLD) for key, value in state_of(1, rank).items()}
    with pipeline_of() as pipeline:
        pipeline.save(state, path, no_dist=True)


def _start(scene: Scene, folder: Path) -> list[Fork]:
    port = free_port() if scene.store == "host" else 0
    return [fork(_act(scene, folder, rank, port)) for rank in range(WORLD)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _act(scene: Scene, folder: Path, rank: int, port: int) -> Callable[[], Any]:
    def act() -> Any:
        if scene.store == "host":
            store: Any = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)
        else:
            store = dist.FileStore(str(folder / "meeting"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        return (_save if scene.graph == "save" else _load)(scene, folder, rank == scene.victim)

    return act


def _save(scene: Scene, folder: Path, is_victim: bool) -> list[str]:
    nodes, changes = (), None
    if is_victim and scene.place in SAVE_PLACES:
        nodes = (_node(SAVE_PLACES[scene.place], scene.how),)
    elif is_victim:
        changes = _FirstOf(scene.place, scene.how)
    with (
        several_files(),
        pipeline_of(changes, scene.config, timeout=TIMEOUT, save_nodes=nodes) as pipeline,
    ):
        # The group is made before the clock runs.
        pipeline.coordinator().exchange("start", b"")
        return _ended_by(scene, lambda: pipeline.save(state_of(2), folder / "checkpoint"))


def _load(scene: Scene, folder: Path, is_victim: bool) -> list[str]:
    nodes = (_node(LOAD_PLACES[scene.place], scene.how),) if is_victim else ()
    state = template()
    with pipeline_of(None, scene.config, timeout=TIMEOUT, load_nodes=nodes) as pipeline:
        pipeline.coordinator().exchange("start", b"")
        problems = _ended_by(scene, lambda: pipeline.load(state, folder / "checkpoint"))
    if not _keeps_nothing(scene):
        assert_same(state, template())
    return problems


def _ended_by(scene: Scene, action: Callable[[], Any]) -> list[str]:
    """What is wrong with how a save or load of a rank that is left has ended."""
    started = time.monotonic()
    try:
        action()
    except (CoordinationError, RollbackFailedError) as error:
        seconds = time.monotonic() - started
        problems = [f"it took {seconds:.1f} s"] if seconds > TIMEOUT + SPARE else []
        if not isinstance(error, TorchCheckpointException):
            problems.append(f"{type(error).__mro__} is not torch's")
        is_said = scene.how == "cut" or f"rank {scene.victim}" in str(error)
        if isinstance(error, RollbackFailedError) and not _keeps_nothing(scene):
            problems.append(f"not put back: {error}")
        return problems if is_said else [*problems, f"it says: {error}"]
    return ["it did not raise"]


def _keeps_nothing(scene: Scene) -> bool:
    """Whether tensors have been read over by then, and there are no copies."""
    is_read = scene.place in ("settle", "apply")
    return is_read and (scene.config or {}).get("rollback") == "verify_first"


def _node(value: str, how: str) -> Node:
    return Node("fault", lambda **values: _vanish(how), (value,))


class _FirstOf(FaultyChanges):
    """Loses this rank at its first change by a method."""

    def __init__(self, method: str, how: str) -> None:
        super().__init__(Fault(-1, 0), lambda: _vanish(how))
        self._method = method

    def _is_due(self, fault: Fault, number: int, method: str) -> bool:
        if method != self._method:
            return False
        self._method = ""
        return True


def _vanish(how: str) -> None:
    if how != "cut":
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)


def _problems(scene: Scene, folder: Path, ranks: list[Fork]) -> list[str]:
    problems = []
    ends = {r: ranks[r].wait(60) for r in range(WORLD) if r != scene.victim or scene.how == "cut"}
    for rank, end in ends.items():
        found = end.value if end.how == "ok" else [f"{end.how} {end.error} {end.trace}"]
        problems += [f"rank {rank}: {problem}" for problem in found]
    if scene.how != "cut":
        os.kill(ranks[scene.victim].pid, signal.SIGKILL)
        ranks[scene.victim].wait(10)
    after = fork(lambda: _after(scene, folder)).wait(60)
    return problems + (after.value if after.how == "ok" else [str(after)])


def _after(scene: Scene, folder: Path) -> list[str]:
    """The old checkpoint is there, to the last bit, and the next save leaves nothing else."""
    path = folder / "checkpoint"
    # A coordinator that is cut off while it commits lives on, and commits.
    is_new = scene.how == "cut" and scene.place == "symlink"
    check_loads(path, 2 if is_new else 1)
    save_all_of(path)
    check_loads(path, 1)
    return [f"the next save leaves {left_over(path)}"] if left_over(path) else []
