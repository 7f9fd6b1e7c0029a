"""What the markers of killed saves say that they have left to delete, torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.liveness import MARK_BYTES
from dcp_pipeline.layout.names import is_plain_dcp_data, marker_save_id
from dcp_pipeline.layout.record import is_live_marker
from dcp_pipeline.storage.base import Directory

__all__ = ["replaced_by_killed"]


def replaced_by_killed(
    directory: Directory,
    stale_after: float,
    may_be_left: Callable[[str], bool] = is_plain_dcp_data,
) -> frozenset[str]:
    """Data files that saves were to replace, or were giving names to, which then ended.

    Such a name carries no save id, and no commit record has it: only the marker of the save still
    knows that the file is nobody's.

    Args:
        may_be_left: whether such a file can have this name; a marker is not trusted with others.
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
    return frozenset(filter(may_be_left, found))
