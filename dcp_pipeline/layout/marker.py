"""What the markers of killed saves say that they have left to delete, torch-free."""

from __future__ import annotations

import json

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.liveness import MARK_BYTES
from dcp_pipeline.layout.names import is_plain_dcp_data, marker_save_id
from dcp_pipeline.layout.record import is_live_marker
from dcp_pipeline.storage.base import Directory

__all__ = ["replaced_by_killed"]


def replaced_by_killed(directory: Directory, stale_after: float) -> frozenset[str]:
    """Plain DCP's data files that saves were to replace which ended before they deleted them.

    Such a name carries no save id, and once the commit is made no ``.metadata`` has it any more:
    only the marker of the save still knows that the file is nobody's.
    """
    found: set[str] = set()
    for name in directory.names():
        if marker_save_id(name) is None or is_live_marker(directory, name, stale_after):
            continue
        try:
            replaced = json.loads(directory.read(name, 0, MARK_BYTES))["replaces"]
        except (CheckpointError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(replaced, list):
            found.update(entry for entry in replaced if isinstance(entry, str))
    return frozenset(filter(is_plain_dcp_data, found))
