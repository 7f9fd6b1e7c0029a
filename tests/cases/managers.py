"""Managers of short runs, and what they leave."""

from pathlib import Path
from typing import Any

import torch

from dcp_pipeline.manager import CheckpointManager
from tests.cases.jobs import pipeline_of


def state(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((30,), value)}


def manager_of(
    root: Any, config: dict[str, Any] | None = None, **settings: Any
) -> CheckpointManager:
    settings = {"heartbeat_seconds": 0.1, "takeover_seconds": 0.5} | settings
    return CheckpointManager(root, pipeline_of(config), **settings)


def everything_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))
