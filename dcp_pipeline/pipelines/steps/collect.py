"""Node ``collect``: from the caller's state to entries."""

from __future__ import annotations

from typing import Any

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.state.collect import collect
from dcp_pipeline.state.flatten import flatten
from dcp_pipeline.types.entries import Entries

__all__ = ["collect_entries"]


def collect_entries(state: Any, job: SaveJob) -> Entries:
    """Expand, flatten and encode the state; see :mod:`dcp_pipeline.state`."""
    flat = flatten(state)
    if any(not leaf.path for leaf in flat.leaves):
        raise UnsupportedLeafError(
            f"the state is a {type(state).__name__}; pass a dict of names to values"
        )
    job.empty = flat.empty
    return collect(flat, job.parts.serialization.encode_comparable)
