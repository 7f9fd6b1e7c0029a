"""A run killed at every change that its save makes, in turn; in a process of its own, which forks.

``python -m tests.cases.manager_killed FOLDER foreground|background`` prints what was tried and what
was wrong, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.storage import filesystem
from dcp_pipeline.tools.latest import find_latest
from dcp_pipeline.tools.prune import prune
from tests.crash.changes import CountedChanges, Made, Stop, UnsyncedChanges
from tests.crash.forks import Ended, fork
from tests.crash.sweep import stops

SETTINGS: dict[str, Any] = {"keep_last": 1, "heartbeat_seconds": 0.2, "takeover_seconds": 1.0}


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5000,), value)}


def save(root: Path, step: int, changes: Any, in_background: bool = False) -> None:
    """Save a step, by a manager that removes the one before it."""
    filesystem.FileChanges = lambda: changes  # type: ignore[assignment, misc]
    with Pipeline.from_config({"storage": {"thread_count": 1}}) as pipeline:
        with CheckpointManager(root, pipeline, **SETTINGS) as manager:
            if in_background:
                manager.async_save(step, state(float(step)))
            else:
                manager.save(step, state(float(step)))


def problems_after(root: Path, is_done: bool) -> list[str]:
    """What is wrong with what a killed run has left, and with the run after it."""
    found = state(-1.0)
    problems = []
    with CheckpointManager(root) as manager:
        steps, step = manager.steps(), manager.restore(found)
    if step not in ((2,) if is_done else (1, 2)) or set(found["w"].tolist()) != {float(step or 0)}:
        problems.append(f"restored {step} of {steps}: {found['w'][:3]}")
    latest = find_latest(root)
    if latest.checkpoint is None or latest.checkpoint.step != step or latest.damaged:
        problems.append(f"latest says {latest}")
    save(root, 3, UnsyncedChanges())
    for path in root.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)  # what is new may be about to be a save's
    report = prune(root)
    left = sorted(str(path.relative_to(root)) for path in root.iterdir())
    if left != ["step-3"] or report.failed or report.kept:
        problems.append(f"left after the next run: {left}, {report}")
    return problems


def main(folder: str, in_background: bool) -> dict[str, Any]:
    before, root = Path(folder, "before"), Path(folder, "run")
    save(before, 1, UnsyncedChanges())

    def run(stop: Stop | None) -> Ended:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)

        def work() -> list[Made]:
            changes = CountedChanges(stop)
            save(root, 2, changes, in_background)
            return changes.made

        return fork(work).wait(60.0)

    whole = run(None)
    made = [(method, name) for method, name in whole.value]
    points, problems = [], [f"not killed: {problem}" for problem in problems_after(root, True)]
    for stop in stops(made, is_full=False):
        ended = run(stop)
        point = (stop.when, *made[stop.number])
        points.append(point)
        if ended.how != "killed":
            problems.append(f"{point}: ended by {ended}")
        problems += [f"{point}: {problem}" for problem in problems_after(root, is_done=False)]
    return {"made": made, "points": points, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2] == "background")))
