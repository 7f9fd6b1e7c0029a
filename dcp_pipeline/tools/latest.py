"""The step that a restore would take, as far as its files' sizes tell; torch-free for ours."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dcp_pipeline.core.errors import CheckpointNotFoundError
from dcp_pipeline.tools.listing import CheckpointInfo, list_directory
from dcp_pipeline.tools.opening import State

__all__ = ["Latest", "find_latest"]


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest step that is whole.

    Attributes:
        checkpoint: that step; ``None`` where none is whole.
        damaged: name of each newer step that was committed and is not whole, and what is wrong.
        unfinished: name of each newer step that was never committed, and its state.
    """

    checkpoint: CheckpointInfo | None
    damaged: dict[str, str]
    unfinished: dict[str, str]


def find_latest(root: str | os.PathLike[str]) -> Latest:
    """Look for the newest step below ``root`` whose files all have their sizes; no data is read.

    Raises:
        ConfigError: a URI of another scheme than ``file``.
        CheckpointNotFoundError: there is no such directory, or no step in it was ever committed.
    """
    damaged: dict[str, str] = {}
    unfinished: dict[str, str] = {}
    steps = [info for info in list_directory(root).checkpoints if info.step is not None]
    for info in reversed([info for info in steps if info.name != "."]):
        if info.state in (State.IN_PROGRESS, State.INCOMPLETE):
            unfinished[info.name] = str(info.state)
            continue
        if not info.problem:
            return Latest(info, damaged, unfinished)
        damaged[info.name] = info.problem
    if not damaged:
        location = os.fspath(root)
        raise CheckpointNotFoundError(f"{location}: no step was ever committed", location)
    return Latest(None, damaged, unfinished)
