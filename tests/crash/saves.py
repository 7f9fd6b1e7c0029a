"""The saves that are killed, and what a directory opens as afterwards."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_pipeline.core.errors import CheckpointNotFoundError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.crash.changes import UnsyncedChanges
from tests.equal import assert_same

__all__ = ["NOTHING", "left_over", "opened", "opened_by_dcp", "pipeline_of", "save", "save_as_rank"]

NOTHING = 0
"""The generation that a directory without a checkpoint opens as."""

TIMEOUT = 15.0
ROWS = 100


def state_of(generation: int, rank: int | None = None, rows: int = ROWS) -> dict[str, Any]:
    """What a save of a generation holds: ``None`` for what both ranks hold together."""
    state = dict(_state(generation, rows))
    if rank is not None:
        del state[f"of{1 - rank}"]
    return state


@lru_cache(maxsize=16)
def _state(generation: int, rows: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(generation)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    return {
        "step": generation,
        "shared": {"w": noise(50, 7), "b": noise(7).to(torch.bfloat16)},
        "of0": {"w": noise(rows, 100), "text": f"generation {generation}"},
        "of1": {"w": noise(rows, 60), "flags": noise(9) > 0},
        "layers": {str(number): noise(rows, 25) for number in range(8)},
    }


def template(rows: int = ROWS) -> dict[str, Any]:
    """A state of the same shape in which nothing is of any generation."""
    state = state_of(1, rows=rows)
    for part in ("shared", "of0", "of1", "layers"):
        state[part] = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else ""
            for key, value in state[part].items()
        }
    return state | {"step": -1}


def pipeline_of(
    serialization: str, changes: FileChanges | None = None, thread_count: int = 1
) -> Pipeline:
    """A pipeline that writes each data file in several pieces."""
    pipeline = Pipeline.from_config(
        {
            "serialization": serialization,
            "coordination": {"timeout_seconds": TIMEOUT, "poll_seconds": 0.05},
            "storage": {"thread_count": thread_count},
        }
    )
    storage = FileSystemStorage(
        thread_count=thread_count, buffer_bytes=64 << 10, changes=changes or UnsyncedChanges()
    )
    object.__setattr__(pipeline._parts, "storage", storage)
    return pipeline


def save(
    path: Path,
    generation: int,
    serialization: str,
    changes: FileChanges | None = None,
    thread_count: int = 1,
    rows: int = ROWS,
) -> None:
    """Save a generation in this process alone."""
    with pipeline_of(serialization, changes, thread_count) as pipeline:
        pipeline.save(state_of(generation, rows=rows), path, no_dist=True)


def save_as_rank(
    rank: int, meeting: Path, path: Path, generation: int, serialization: str, changes: FileChanges
) -> None:
    """Save a generation as one of two ranks, which find each other through a file."""
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with pipeline_of(serialization, changes) as pipeline:
        pipeline.save(state_of(generation, rank), path)


def save_by_dcp(path: Path, generation: int) -> None:
    """Save a generation with plain DCP."""
    dcp.save(state_of(generation), checkpoint_id=path, no_dist=True)


def opened(path: Path, rows: int = ROWS) -> int:
    """The generation that a directory opens as.

    Raises:
        AssertionError: what was loaded is of no generation, to the last bit.
        any other error of the load: the directory does not open at all.
    """
    state = template(rows)
    with pipeline_of("torch_save") as pipeline:
        try:
            pipeline.load(state, path, no_dist=True)
        except CheckpointNotFoundError:
            return NOTHING
    return _generation(state, rows)


def opened_by_dcp(path: Path, rows: int = ROWS) -> int:
    """The generation that plain DCP opens; it knows of a checkpoint by its ``.metadata`` alone."""
    if not (path / ".metadata").exists():
        return NOTHING
    state = template(rows)
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return _generation(state, rows)


def _generation(state: dict[str, Any], rows: int) -> int:
    generation: int = state["step"]
    assert_same(state, state_of(generation, rows=rows))
    return generation


def left_over(path: Path) -> list[str]:
    """What lies in a directory and is not named by its manifest, and the other way round."""
    wanted: set[str] = set()
    if (path / "manifest.json").exists():
        manifest = Manifest.decode((path / "manifest.json").read_bytes())
        wanted = {entry.name for entry in (*manifest.files, *manifest.sums)} | {"manifest.json"}
        wanted |= {".metadata"} if manifest.metadata else set()
    found = set(os.listdir(path)) if path.exists() else set()
    return sorted(found ^ wanted)


def copy(source: Path, target: Path) -> None:
    """Copy a directory as it is, links and all; one that is not there gives none."""
    shutil.rmtree(target, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, target, symlinks=True)
