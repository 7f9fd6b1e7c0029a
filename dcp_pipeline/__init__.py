"""A declarative checkpoint pipeline for distributed PyTorch training.

Names are imported when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "dcp_pipeline.api": (
        "load",
        "load_keys",
        "load_state_dict",
        "save",
        "save_state_dict",
    ),
    "dcp_pipeline.builder": ("PipelineBuilder",),
    "dcp_pipeline.config.model": ("PipelineConfig",),
    "dcp_pipeline.core.manifest": ("Manifest",),
    "dcp_pipeline.core.table": ("ChunkTable",),
    "dcp_pipeline.dcp": ("FileSystemReader", "FileSystemWriter"),
    "dcp_pipeline.graph.graph": ("Graph",),
    "dcp_pipeline.graph.node": ("Node", "Where"),
    "dcp_pipeline.manager": ("CheckpointManager",),
    "dcp_pipeline.pipeline": ("Pipeline",),
    "dcp_pipeline.pipelines.report": ("LoadReport",),
    "dcp_pipeline.state.app_state": ("AppState",),
    "dcp_pipeline.tools.verify": ("verify",),
    "dcp_pipeline.types.exceptions": ("CheckpointException",),
}


_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


__all__ = [
    "AppState",
    "CheckpointException",
    "CheckpointManager",
    "ChunkTable",
    "FileSystemReader",
    "FileSystemWriter",
    "Graph",
    "LoadReport",
    "Manifest",
    "Node",
    "Pipeline",
    "PipelineBuilder",
    "PipelineConfig",
    "Where",
    "load",
    "load_keys",
    "load_state_dict",
    "save",
    "save_state_dict",
    "verify",
]


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
