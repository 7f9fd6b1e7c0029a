"""Ranks that are lost while the coordinator commits: what the others say is true."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException as TorchCheckpointException

from dcp_pipeline.coordination.process_group import ProcessGroupCoordinator
from dcp_pipeline.core.errors import CoordinationError
from dcp_pipeline.pipelines.steps import save_commit
from tests.crash.forks import fork
from tests.faults_running.faulty import Fault, FaultyChanges
from tests.faults_running.jobs import check_loads, left_over, pipeline_of, state_of
from tests.faults_running.lost import save_all_of

__all__ = ["lose_in_commit"]

WORLD = 3
TIMEOUT = 6.0
SPARE = 8.0
"""For a machine that is busy."""


@dataclass(frozen=True)
class Scene:
    """Who is lost, how, and when.

    Attributes:
        place: ``check``, before the commit has begun; ``before`` or ``after`` the record is
            replaced; ``broadcast``, between the answer and the manifest.
        victim: the rank, by the coordinator's doing; 0 is the coordinator itself.
        how: ``kill``, ``stop``, or ``interrupt``.
    """

    place: str
    victim: int
    how: str


def lose_in_commit(root: str, scenes: list[list[Any]]) -> list[str]:
    """Play all scenes at a time, since they mostly wait; what was wrong."""
    played = []
    for number, values in enumerate(scenes):
        scene, folder = Scene(*values), Path(root, str(number))
        assert fork(lambda folder=folder: save_all_of(folder / "checkpoint")).wait(60).how == "ok"
        ranks = [fork(_act(scene, folder, rank)) for rank in range(WORLD)]
        played.append((scene, folder, ranks))
    problems = []
    for scene, folder, ranks in played:
        is_left = [scene.how == "interrupt" or rank != scene.victim for rank in range(WORLD)]
        ends = {rank: ranks[rank].wait(60) for rank in range(WORLD) if is_left[rank]}
        if not is_left[scene.victim]:
            os.kill(ranks[scene.victim].pid, signal.SIGKILL)
            ranks[scene.victim].wait(10)
        for rank, end in ends.items():
            found = end.value if end.how == "ok" else [f"{end.how} {end.error} {end.trace}"]
            problems += [f"{scene}: rank {rank}: {problem}" for problem in found]
        after = fork(lambda scene=scene, folder=folder: _after(scene, folder)).wait(60)
        problems += after.value if after.how == "ok" else [f"{scene}: {after}"]
    return problems


def _act(scene: Scene, folder: Path, rank: int) -> Callable[[], list[str]]:
    def act() -> list[str]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store = dist.FileStore(str(folder / "meeting"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        pids: list[Any] = [None] * WORLD
        dist.all_gather_object(pids, os.getpid())
        changes = _at_commit(scene, pids[scene.victim]) if rank == 0 else None
        with pipeline_of(changes, timeout=TIMEOUT) as pipeline:
            # The group is made before the clock runs.
            pipeline.coordinator().exchange("start", b"")
            started = time.monotonic()
            try:
                pipeline.save(state_of(2), folder / "checkpoint")
            except (CoordinationError, KeyboardInterrupt) as error:
                seconds = time.monotonic() - started
                return _problems(scene, rank, error, seconds)
            # Nothing was lost of what this rank had to do, or to hear.
            is_through = scene.place == "broadcast" and rank != scene.victim
            return [] if is_through else ["it did not raise"]

    return act


def _at_commit(scene: Scene, pid: int) -> FaultyChanges | None:
    """Makes the coordinator strike at the place of a scene."""

    def strike() -> None:
        _strike(scene.how, pid)

    if scene.place == "broadcast":
        real = ProcessGroupCoordinator.broadcast

        def broadcast(self: ProcessGroupCoordinator, step: str, data: bytes | None) -> bytes:
            strike()
            return real(self, step, data)

        ProcessGroupCoordinator.broadcast = broadcast  # type: ignore[method-assign]
        return None
    if scene.place == "check":
        real_assemble = save_commit._assemble

        def assemble(*args: Any) -> Any:
            strike()
            return real_assemble(*args)

        save_commit._assemble = assemble
        return None
    return _AtRecord(scene.place == "after", strike)


class _AtRecord(FaultyChanges):
    """Acts before or after the commit record is replaced."""

    def __init__(self, is_done: bool, act: Callable[[], None]) -> None:
        super().__init__(Fault(-1, 0, is_done), act)

    def _is_due(self, fault: Fault, number: int, method: str) -> bool:
        return (method, self.made[number][1]) == ("replace", "manifest.json")


def _strike(how: str, pid: int) -> None:
    sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}[how]
    os.kill(pid, sent)
    if pid == os.getpid() and how != "interrupt":
        # Another thread may take the signal, and this one run on for a moment.
        time.sleep(60)
    while how == "kill" and pid != os.getpid() and _is_running(pid):
        time.sleep(0.001)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def _problems(scene: Scene, rank: int, error: BaseException, seconds: float) -> list[str]:
    """What is wrong with what a rank says that is left."""
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    problems = [f"it took {seconds:.1f} s"] if seconds > TIMEOUT + SPARE else []
    if isinstance(error, KeyboardInterrupt):
        problems += [] if rank == scene.victim else ["it was interrupted"]
    else:
        if not isinstance(error, TorchCheckpointException):
            problems.append(f"{type(error).__mro__} is not torch's")
        if f"rank {scene.victim} was lost during commit" not in said:
            problems.append("it does not name the victim")
        if f"rank {rank} was lost" in said:
            problems.append("it names itself")
    says = {
        True: "The checkpoint is committed" in said,
        False: "Nothing was committed" in said,
        None: "It is not known whether" in said,
    }
    is_new = not _is_old(scene)
    if sum(says.values()) != 1 or says[not is_new]:
        problems.append(f"it should say {'' if is_new else 'not '}committed")
    # Who has decided knows it; the others know it unless that one is the one who is gone.
    if says[None] and scene.victim != 0 and not isinstance(error, KeyboardInterrupt):
        problems.append("it should know")
    if isinstance(error, CoordinationError) and not says[error.is_committed]:
        problems.append(f"it notes {error.is_committed}")
    return [f"{problem}: {said}" for problem in problems]


def _is_old(scene: Scene) -> bool:
    """Whether the checkpoint stays as it was: whoever is interrupted ends what has begun."""
    return scene.victim == 0 and scene.place in ("check", "before") and scene.how != "interrupt"


def _after(scene: Scene, folder: Path) -> list[str]:
    path = folder / "checkpoint"
    check_loads(path, 1 if _is_old(scene) else 2)
    save_all_of(path)
    return [f"{scene}: the next save leaves {left_over(path)}"] if left_over(path) else []
