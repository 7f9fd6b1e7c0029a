"""Node ``collect``: from the caller's state to entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.core.garbage import collector_paused
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.state.collect import collect
from dcp_pipeline.state.flatten import FlatState, flatten, is_stateful
from dcp_pipeline.types.entries import Entries

__all__ = ["collect_entries", "taken_apart"]


@collector_paused()
def collect_entries(state: Any, job: SaveJob) -> Entries:
    """Expand, flatten and encode the state; see :mod:`dcp_pipeline.state`."""
    flat = taken_apart(state, job.coordinator)
    job.empty = [(path, kind) for path, kind in flat.empty if path]
    serialization = job.parts.serialization
    checks = (serialization.check_name, serialization.check_dtype)
    if job.coordinator.world_size > 1 or job.parts.config.fingerprint:
        return collect(flat, serialization.encode_comparable, *checks)
    return collect(flat, lambda value: (serialization.encode_value(value), 0), *checks)


def taken_apart(state: Any, coordinator: Coordinator) -> FlatState:
    """This rank's state, whose root is a mapping or a ``Stateful`` object, taken apart.

    Raises:
        UnsupportedLeafError: it is anything else, or holds keys that no checkpoint can hold.
    """
    if not isinstance(state, Mapping) and not is_stateful(state):
        raise UnsupportedLeafError(
            f"the state is a {type(state).__name__}; pass a dict of names to values"
        )
    return flatten(state, coordinator.rank, coordinator.world_size)
