"""Interrupts between any two lines of what opens files, starts threads and leaves marks."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from dcp_pipeline.core.liveness import is_given_up
from dcp_pipeline.pipeline import Pipeline
from tests.faults_running.jobs import check_loads, left_over, pipeline_of, state_of, template

__all__ = ["interrupt_loads_at_lines", "interrupt_saves_at_lines"]

WHERE = (
    "pipelines/job.py",
    "pipelines/complete.py",
    "steps/save_agree.py",
    "steps/save_commit.py",
    "storage/changes.py",
    "storage/commit_lock.py",
    "storage/file_source.py",
    "storage/file_writer.py",
    "storage/filesystem.py",
)
NOT_AT = ("changes.close(",)
"""From there on it is the descriptor of whoever closes it, who does so at once."""


class _AtLine:
    """Raises ``KeyboardInterrupt`` before the line of a number; ``is_over`` if it never came."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.place = ""

    @property
    def is_over(self) -> bool:
        return not self.place

    def __enter__(self) -> _AtLine:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.endswith(WHERE) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._is_left_out(frame):
            self.left -= 1
            if self.left == -1:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._on_line

    def _is_left_out(self, frame: FrameType) -> bool:
        line = _LINES.setdefault(
            frame.f_code.co_filename, Path(frame.f_code.co_filename).read_text().splitlines()
        )[frame.f_lineno - 1]
        callers = (frame, frame.f_back or frame)
        # What is raised while an object is being finalized goes nowhere.
        is_finalizer = any(one.f_code.co_name == "__del__" for one in callers)
        return is_finalizer or any(part in line for part in NOT_AT)


_LINES: dict[str, list[str]] = {}


def interrupt_saves_at_lines(root: Path, step: int, first: int = 0) -> list[str]:
    """Interrupt a save before every ``step``-th line from ``first`` on; what it leaves behind."""
    old, path = root / "old", root / "checkpoint"
    problems: list[str] = []
    with pipeline_of() as pipeline:
        pipeline.save(state_of(1), old)
        for number in range(first, 1 << 20, step):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(old, path)
            before = _held()
            at = _interrupted(number, lambda: pipeline.save(state_of(2), path))
            if at.is_over:
                return problems if number > 100 else [f"only {number} lines"]
            problems += [f"{at.place}: {problem}" for problem in _left(before, path)]
            _check(pipeline, path)
            if left_over(path):
                problems.append(f"{at.place}: the next save leaves {left_over(path)}")
    raise AssertionError("unreachable")


def interrupt_loads_at_lines(path: Path, step: int, first: int = 0) -> list[str]:
    """As above, for a load."""
    problems: list[str] = []
    with pipeline_of() as pipeline:
        pipeline.save(state_of(1), path)
        for number in range(first, 1 << 20, step):
            before = _held()
            at = _interrupted(number, lambda: pipeline.load(template(), path))
            if at.is_over:
                return problems if number > 30 else [f"only {number} lines"]
            problems += [f"{at.place}: {problem}" for problem in _left(before, path)]
    raise AssertionError("unreachable")


def _interrupted(number: int, action: Any) -> _AtLine:
    at = _AtLine(number)
    try:
        with at:
            action()
    except KeyboardInterrupt:
        pass
    return at


def _held() -> set[str]:
    held = set()
    for name in os.listdir("/proc/self/fd"):
        # One is that of the listing itself.
        with contextlib.suppress(FileNotFoundError):
            held.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    return held


def _left(before: set[str], path: Path) -> list[str]:
    """Descriptors, threads and living marks of a save that is over."""
    gc.collect()
    problems = []
    deadline = time.monotonic() + 10
    while any(thread.name == "dcp_pipeline heartbeat" for thread in threading.enumerate()):
        if time.monotonic() > deadline:
            problems.append("a thread renews the marker")
            break
        time.sleep(0.001)
    opened = {one for one in _held() - before if os.fspath(path) in one}
    if opened:
        problems.append(f"open: {sorted(opened)}")
    for name in os.listdir(path) if path.exists() else ():
        mark = os.readlink(path / name) if os.path.islink(path / name) else name
        if name.startswith((".saving-", ".committing.lock")) and not is_given_up(mark):
            problems.append(f"alive: {name}")
    return problems


def _check(pipeline: Pipeline, path: Path) -> None:
    """It is the old one or the new one, and the next save is as if nothing had been."""
    state = template()
    pipeline.load(state, path)
    check_loads(path, int(state["step"]))
    assert isinstance(state["shared"], torch.Tensor)
    pipeline.save(state_of(3), path)
