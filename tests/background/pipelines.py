"""Pipelines that save in the background, and where that is."""

from pathlib import Path
from typing import Any

import psutil

from dcp_pipeline import Pipeline, PipelineConfig
from tests.background.faults import TroubledConfig
from tests.marks import slow

ALWAYS = ["thread", "process"]
MOSTLY_THREAD = ["thread", slow("process")]
"""A process takes seconds to start."""


def own_processes() -> list[psutil.Process]:
    """The background processes of this one."""
    return [
        child
        for child in psutil.Process().children()
        if any("multiprocessing.spawn" in word for word in child.cmdline())
    ]


def pipeline_of(background: str, **settings: Any) -> Pipeline:
    """Of a ``background``, with fields of it and other keys of a config."""
    own = {"max_in_flight", "when_full", "on_error", "retries", "close_timeout_seconds"}
    chosen = {"kind": background, **{k: settings.pop(k) for k in own & set(settings)}}
    return Pipeline(PipelineConfig(background=chosen, **settings))


def troubled_pipeline(background: str, path: Path, **fields: Any) -> Pipeline:
    own = set(TroubledConfig.model_fields)
    storage = {k: fields.pop(k) for k in own & set(fields)}
    storage = TroubledConfig(count_in=str(path / "faults"), **storage)
    return pipeline_of(background, storage=storage, **fields)
