"""Exports of layouts whose files have final names, killed at every change that they make."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dcp_pipeline.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.crash.changes import CountedChanges, UnsyncedChanges
from tests.crash.forks import Ended, fork
from tests.crash.sweep import stops

__all__ = ["kill_export"]

SECONDS = 60.0


def state_of(generation: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(generation)
    return {f"layers.{i}.w": torch.randn(60, 50, generator=random) for i in range(4)}


def pipeline_of(layout: str, count: int, changes: FileChanges | None = None) -> Pipeline:
    """Of about ``count`` files."""
    settings: dict[str, Any] = {"kind": layout}
    if layout == "huggingface":
        settings["max_shard_size"] = 48_000 // count + 1
    pipeline = Pipeline.from_config({"layout": settings, "storage": {"thread_count": 1}})
    storage = FileSystemStorage(
        thread_count=1, buffer_bytes=64 << 10, changes=changes or UnsyncedChanges()
    )
    object.__setattr__(pipeline._parts, "storage", storage)
    return pipeline


def save(path: Path, layout: str, count: int, generation: int, changes: FileChanges | None) -> None:
    with pipeline_of(layout, count, changes) as pipeline:
        pipeline.save(state_of(generation), path)


def opened(path: Path, layout: str) -> int:
    """The generation that a load finds, 0 for none."""
    found = {name: torch.zeros_like(tensor) for name, tensor in state_of(1).items()}
    try:
        with pipeline_of(layout, 1) as pipeline:
            pipeline.load(found, path)
    except CheckpointNotFoundError:
        return 0
    return generation_of(found)


def generation_of(found: dict[str, torch.Tensor]) -> int:
    for generation in (1, 2, 3):
        wanted = state_of(generation)
        if found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted):
            return generation
    raise AssertionError("it is no generation, or a mixture of several")


def opened_by_others(path: Path) -> int:
    """What those see who know nothing of this package: the single file first, then the index."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return generation_of(load_file(single))
    if not index.exists():
        return 0
    weight_map = json.loads(index.read_text())["weight_map"]
    parts = [load_file(path / name) for name in set(weight_map.values())]
    return generation_of({name: tensor for part in parts for name, tensor in part.items()})


def kill_export(root: str, layout: str, before: int, after: int, is_full: bool) -> dict[str, Any]:
    """Kill the save of generation 2 at every change; what was wrong afterwards.

    Args:
        before: files of the export that is replaced, 0 for none.
        after: files of the new one.
    """
    start, path = Path(root, "before"), Path(root, "killed")
    start.mkdir()
    if before:
        save(start, layout, before, 1, None)

    def run(stop: Any) -> Ended:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(start, path)

        def work() -> list[Any]:
            changes = CountedChanges(stop)
            save(path, layout, after, 2, changes)
            return changes.made

        return fork(work).wait(SECONDS)

    made = [(method, name) for method, name in run(None).value]
    problems: list[str] = []
    seen: set[int] = set()
    points = stops(made, is_full)
    for stop in points:
        ended = run(stop)
        if ended.how != "killed":
            problems.append(f"{stop}: ended by {ended}")
            continue
        try:
            found = opened(path, layout)
            seen.add(found)
            if found not in ((1, 2) if before else (0, 2)):
                problems.append(f"{stop} of {made[stop.number]}: opens as {found}")
            if layout == "huggingface" and opened_by_others(path) != found:
                problems.append(f"{stop}: others see {opened_by_others(path)}, we {found}")
            save(path, layout, after, 3, None)
            if opened(path, layout) != 3:
                problems.append(f"{stop}: the next save is not there")
            left = [entry.name for entry in path.iterdir() if entry.name.startswith(".")]
            wanted = {1: 1}.get(after, after + 1)
            if left or len(list(path.iterdir())) != wanted:
                names = sorted(entry.name for entry in path.iterdir())
                problems.append(f"{stop} of {made[stop.number]}: left are {names}")
        except (AssertionError, CorruptCheckpointError, OSError) as error:
            problems.append(f"{stop} of {made[stop.number]}: {type(error).__name__} {error}")
    return {"points": len(points), "problems": problems, "seen": sorted(seen)}
