"""What is saved and loaded while something fails, and what has to hold afterwards."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.graph.node import Node
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.pipelines.steps import save_write
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.equal import assert_same
from tests.waiting import eventually

__all__ = [
    "check_loads",
    "left_over",
    "listing",
    "nothing_leaks",
    "pipeline_of",
    "save",
    "several_files",
    "state_of",
    "template",
]


def my_rank() -> int:
    """This rank's number; 0 where there is one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def state_of(generation: int, rank: int | None = None) -> dict[str, Any]:
    """What a rank saves: tensors of its own, one that all have, a value and a text."""
    rank = my_rank() if rank is None else rank
    random = torch.Generator().manual_seed(generation)
    shared = torch.randn(40, 33, generator=random)
    return {
        "step": generation,
        "shared": shared,
        f"of{rank}": {
            name: torch.randn(64, 65 + place, generator=random) + rank
            for place, name in enumerate(("a", "b", "c"))
        },
        "text": f"generation {generation}",
    }


def template(rank: int | None = None) -> dict[str, Any]:
    """A state of the same shape with nothing of any generation in it."""
    state = state_of(0, rank)
    for tensor in (state["shared"], *state[f"of{my_rank() if rank is None else rank}"].values()):
        tensor.fill_(-7.0)
    return state | {"step": -1, "text": ""}


def pipeline_of(
    changes: FileChanges | None = None,
    config: dict[str, Any] | None = None,
    *,
    timeout: float = 30.0,
    storage: FileSystemStorage | None = None,
    save_nodes: tuple[Node, ...] = (),
    load_nodes: tuple[Node, ...] = (),
) -> Pipeline:
    """A pipeline that writes in small pieces with two threads, and polls quickly."""
    settings: dict[str, Any] = {
        "coordination": {"timeout_seconds": timeout, "poll_seconds": 0.05},
        "layout": {"block_bytes": "4KiB"},
        **(config or {}),
    }
    parsed = Pipeline.from_config(settings).config
    pipeline = Pipeline(parsed, save_nodes=save_nodes, load_nodes=load_nodes)
    if storage is None:
        storage = FileSystemStorage(thread_count=2, buffer_bytes=32 << 10, changes=changes)
    object.__setattr__(pipeline._parts, "storage", storage)
    return pipeline


@contextmanager
def several_files() -> Iterator[None]:
    """A rank's data goes to one file per thread, however little it is."""
    with patch.object(save_write, "_SMALLEST_FILE", 1 << 12):
        yield


def save(path: Path, generation: int, changes: FileChanges | None = None, **settings: Any) -> None:
    """Save a generation."""
    with several_files(), pipeline_of(changes, **settings) as pipeline:
        pipeline.save(state_of(generation), path)


def check_loads(path: Path, generation: int) -> None:
    """Raise unless the directory loads as a generation, to the last bit."""
    state = template()
    with pipeline_of() as pipeline:
        pipeline.load(state, path)
    assert_same(state, state_of(generation))


def listing(path: Path) -> list[str]:
    """The names in a directory, none for one that is not there."""
    return sorted(os.listdir(path)) if path.exists() else []


def left_over(path: Path) -> list[str]:
    """What lies in a directory and is not named by its manifest, and the other way round."""
    wanted: set[str] = set()
    if (path / "manifest.json").exists():
        manifest = Manifest.decode((path / "manifest.json").read_bytes())
        wanted = {entry.name for entry in (*manifest.files, *manifest.sums)} | {"manifest.json"}
        wanted |= {".metadata"} if manifest.metadata else set()
    return sorted(set(listing(path)) ^ wanted)


@contextmanager
def nothing_leaks(seconds: float = 10.0) -> Iterator[None]:
    """Raise unless there are as many threads and open files afterwards as before."""
    gc.collect()
    before = _held()
    yield
    is_given_back = eventually(
        lambda: all(now <= then for now, then in zip(_held(), before, strict=True)), seconds
    )
    assert is_given_back, f"threads and files: {before} became {_held()}"


def _held() -> tuple[int, int]:
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("dcp_pipeline")]
    return len(ours), len(os.listdir("/proc/self/fd"))
