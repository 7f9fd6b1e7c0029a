"""Foreign checkpoints through the ordinary load graph, from what ``open_source`` gives."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.layout.foreign import open_source
from dcp_pipeline.pipelines.load import load_graph
from dcp_pipeline.pipelines.load_job import LoadJob, Rollback
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.together import run_together
from tests.equal import assert_same

__all__ = ["assert_equal", "load_foreign", "nested", "opened"]


def assert_equal(found: Any, wanted: Any) -> None:
    """As :func:`assert_same`, whatever the order of keys."""
    assert_same(_sorted(found), _sorted(wanted))


def _sorted(value: Any) -> Any:
    if type(value) in (dict, OrderedDict):
        return {key: _sorted(value[key]) for key in sorted(value, key=repr)}
    return type(value)(map(_sorted, value)) if type(value) in (list, tuple) else value


class _Opened:
    """A layout that has read its checkpoint already."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def open(self, directory: object) -> Manifest:
        return self._manifest


def opened(path: Path | str, kind: str | None = None) -> Manifest:
    """The manifest of a checkpoint."""
    return open_source(str(path), kind)[1]


def load_foreign(state: Any, path: Path | str, kind: str | None = None) -> list[str]:
    """Load into ``state`` on all ranks; the stored names of what was loaded."""
    directory, manifest = open_source(str(path), kind)
    parts = Parts.build(PipelineConfig())
    parts = replace(parts, layout=cast(Layout, _Opened(manifest)))
    coordinator = parts.coordination.coordinator(None, False, 0)
    try:
        job = LoadJob(parts, coordinator, directory, Rollback("copy"))
        trace = Trace("load", coordinator.rank)
        inputs = {"state": state, "job": job}
        values = run_together(load_graph(parts), inputs, coordinator, trace)
    finally:
        parts.close()
    loaded: list[str] = values["fetched"].loaded
    return loaded


def nested(path: Path | str, kind: str | None = None) -> dict[str, Any]:
    """Everything that a checkpoint holds, without a template."""
    state: dict[str, Any] = {}
    load_foreign(state, path, kind)
    return state
