"""What the ranks of the case tests do: save and load states that tell who wrote what."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tests.faults  # noqa: F401  (registers the storage that fails)
from dcp_pipeline.pipeline import Pipeline

__all__ = ["files", "load", "load_state", "pipeline_of", "save", "save_state", "state_with"]


def pipeline_of(config: dict[str, Any] | None = None) -> Pipeline:
    """A pipeline of a plain mapping, polling quickly for failed peers."""
    settings = dict(config or {})
    settings.setdefault("coordination", {"timeout_seconds": 50, "poll_seconds": 0.05})
    return Pipeline.from_config(settings)


def state_with(value: float, world_size: int | None = None) -> dict[str, Any]:
    """A replicated tensor, one of each rank, a sharded one (over all ranks) and a plain value."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state: dict[str, Any] = {
        "shared": torch.full((40, 3), value),
        f"of{rank}": torch.full((5,), value),
        "value": {"step": value},
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state["sharded"] = distribute_tensor(torch.full((7, 4), value), mesh, [Shard(0)])
    return state


def values_of(state: dict[str, Any]) -> set[float]:
    """All numbers in a state: one of them if it is of one save."""
    found: set[float] = set()
    for value in state.values():
        if isinstance(value, dict):
            found |= values_of(value)
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found |= set(local.flatten().tolist())
        else:
            found.add(float(value))
    return found


def save(path: Path | list[Path], value: float, config: dict[str, Any] | None = None) -> str:
    """Save the state of ``value``; a list of paths has one per rank. The save id."""
    mine = path[dist.get_rank()] if isinstance(path, list) else path
    with pipeline_of(config) as pipeline:
        return pipeline.save(state_with(value), mine).manifest.save_id


def load(path: Path, config: dict[str, Any] | None = None) -> set[float]:
    """Load into a state full of -1; the numbers found."""
    state = state_with(-1.0)
    with pipeline_of(config) as pipeline:
        pipeline.load(state, path)
    return values_of(state)


def save_state(state: Any, path: Path, config: dict[str, Any] | None = None) -> Any:
    """Save any state that can be sent to a rank."""
    with pipeline_of(config) as pipeline:
        return pipeline.save(state, path).manifest.names


def load_state(state: Any, path: Path, config: dict[str, Any] | None = None) -> Any:
    """Load into a state that was sent; it comes back."""
    with pipeline_of(config) as pipeline:
        pipeline.load(state, path)
    return state


def files(path: Path) -> list[str]:
    """The names in a directory."""
    return sorted(os.listdir(path)) if path.exists() else []
