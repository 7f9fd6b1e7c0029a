"""What is in a directory before the save that is killed, and what has to hold afterwards.

The state that is saved over is generation 1 (``HALF_COMMITTED`` has generation 9 under it), the one
that is killed saves generation 2, the next one saves generation 3.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dcp_pipeline.layout.names import save_of
from dcp_pipeline.tools.prune import prune
from tests.crash import saves
from tests.crash.changes import CountedChanges, Stop
from tests.crash.forks import fork
from tests.crash.saves import NOTHING, left_over, opened, opened_by_dcp

__all__ = ["OTHER", "STARTS", "Before", "Scene", "problems_after", "problems_of_prune"]

OTHER = {"torch_save": "safetensors", "safetensors": "torch_save"}
STARTS = ("nothing", "ours", "other", "plain", "left_over", "half_committed")
SECONDS = 60.0


@dataclass(frozen=True)
class Scene:
    """A directory before a save, by name.

    Attributes:
        start: ``nothing``: neither the directory nor its parent are there. ``ours``: a checkpoint.
            ``other``: one of the other serialization. ``plain``: one of plain DCP. ``left_over``:
            one, and all that a save leaves that is killed right before its commit.
            ``half_committed``: one whose save was killed right after it.
        serialization: of all saves but the one under ``other``.
    """

    start: str
    serialization: str

    def make(self, path: Path) -> None:
        """Make the directory."""
        serialization = self.serialization
        if self.start == "plain":
            saves.save_by_dcp(path, 1)
        elif self.start == "other":
            saves.save(path, 1, OTHER[serialization])
        elif self.start != "nothing":
            saves.save(path, 1, serialization)
        if self.start == "left_over":
            kill_at_commit(path, 8, serialization, "before")
        if self.start == "half_committed":
            saves.save(path, 9, serialization)
            kill_at_commit(path, 1, serialization, "after")


def kill_at_commit(path: Path, generation: int, serialization: str, when: str) -> None:
    """Leave what a save leaves that is killed at the replacement of the commit record."""

    def count() -> list[list[str]]:
        changes = CountedChanges()
        saves.save(path.parent / "counted", generation, serialization, changes)
        return [list(made) for made in changes.made]

    made = fork(count).wait(SECONDS).value
    shutil.copytree(path, path.parent / "counted", dirs_exist_ok=True, symlinks=True)
    made = fork(count).wait(SECONDS).value
    shutil.rmtree(path.parent / "counted")
    stop = Stop(made.index(["replace", "manifest.json"]), when)  # type: ignore[arg-type]
    end = fork(lambda: saves.save(path, generation, serialization, CountedChanges(stop)))
    assert end.wait(SECONDS).how == "killed"


@dataclass(frozen=True)
class Before:
    """A scene that was made: the directory, and the generations that it opens as."""

    scene: Scene
    path: Path
    ours: int
    dcp: int

    @classmethod
    def of(cls, scene: Scene, path: Path) -> Before:
        """Make the directory of a scene."""
        scene.make(path)
        return cls(scene, path, opened(path), opened_by_dcp(path))


def problems_after(
    before: Before, path: Path, is_done: bool = False, rows: int = saves.ROWS
) -> list[str]:
    """What is wrong with a directory after a save into it ended anywhere; empty if nothing is.

    - It opens as the checkpoint before the save or as the new one, to the last bit; as the new one
      where ``is_done`` says that the save had returned.
    - Plain DCP opens the same, or the one before: ``.metadata`` is replaced right after the
      manifest, and the files of the checkpoint before are deleted only then.
    - The next save works, both open it, and nothing else is left.
    """
    try:
        found = (opened(path, rows), opened_by_dcp(path, rows))
    except BaseException as error:
        return [f"does not open: {_line(error)}"]
    new = 2 if before.scene.serialization == "torch_save" else NOTHING
    unfinished = () if is_done else ((before.ours, before.dcp), (2, before.dcp))
    if found not in ((2, new), *unfinished):
        return [f"opens as generation {found[0]}, and under plain DCP as {found[1]}"]
    return _after_next_save(before, path, rows)


def problems_of_prune(before: Before, path: Path) -> list[str]:
    """What is wrong with a directory after ``prune`` has tidied what a killed save has left.

    - It opens as before, and so it does under plain DCP.
    - What is left is named by a commit record or belongs to a marker that may be of a live save.
    - The next save works and leaves nothing else.
    """
    found = (opened(path), opened_by_dcp(path))
    if not path.exists():
        return []
    try:
        prune(path)
        again = (opened(path), opened_by_dcp(path))
    except BaseException as error:
        return [f"prune: {_line(error)}"]
    problems = [f"prune makes of {found}: {again}"] if again != found else []
    kept = [name for name in left_over(path) if save_of(name) is not None]
    # While `.metadata` is still to be replaced, what it names is needed too.
    is_half = found[1] not in (found[0], NOTHING)
    if any(name.endswith((".distcp", ".safetensors", ".sums")) for name in kept) and not is_half:
        problems.append(f"prune leaves {kept}")
    return [*problems, *_after_next_save(before, path)]


def _after_next_save(before: Before, path: Path, rows: int = saves.ROWS) -> list[str]:
    try:
        saves.save(path, 3, before.scene.serialization, rows=rows)
        found = (opened(path, rows), opened_by_dcp(path, rows))
    except BaseException as error:
        return [f"the next save: {_line(error)}"]
    wanted = (3, 3 if before.scene.serialization == "torch_save" else NOTHING)
    problems = [f"the next save opens as {found}"] if found != wanted else []
    left = left_over(path)
    return problems + ([f"the next save leaves {left}"] if left else [])


def _line(error: BaseException) -> str:
    # CheckpointException of torch has every rank's traceback in it; its end says what was wrong.
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
