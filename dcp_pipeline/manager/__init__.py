"""The steps of a training run: when to save, which to keep, where to go on, when to stop.

Names are imported when they are first used, so that the config of the manager is read without
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_pipeline.manager.events import CheckpointEvent as CheckpointEvent
    from dcp_pipeline.manager.manager import CheckpointManager as CheckpointManager

__all__ = ["CheckpointEvent", "CheckpointManager"]

_HOME = {
    "CheckpointEvent": "dcp_pipeline.manager.events",
    "CheckpointManager": "dcp_pipeline.manager.manager",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
