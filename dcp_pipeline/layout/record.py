"""What the files of a directory say about its saves, torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.names import METADATA, marker_save_id
from dcp_pipeline.storage.base import Directory

__all__ = ["is_live_marker", "is_overwritten_by_dcp", "live_saves"]

_TAIL_BYTES: Final = 4096


def is_overwritten_by_dcp(manifest: Manifest, directory: Directory) -> bool:
    """Whether ``.metadata`` belongs to a save that the manifest knows nothing of."""
    if not directory.exists(METADATA):
        return False
    written = manifest.metadata
    if written is not None and directory.size(METADATA) == written.size:
        # The pickle ends with the save id; reading all of it would take long at scale.
        tail = directory.read(METADATA, -_TAIL_BYTES, _TAIL_BYTES)
        if manifest.save_id.encode() in tail:
            return False
    digest = digest_of("xxh3_64", directory.read(METADATA)).hex()
    return digest not in (manifest.superseded, None if written is None else written.digest)


def is_live_marker(directory: Directory, name: str, stale_after: float) -> bool:
    """Whether a file is the marker of a save that is under way.

    Args:
        stale_after: seconds after which a marker that was not renewed is of a dead save.
    """
    if marker_save_id(name) is None:
        return False
    try:
        owner = ProcessIdentity.parse(directory.read(name))
        age = directory.age(name)
    except CheckpointError:
        return False
    return not (owner is not None and owner.is_gone()) and age <= stale_after


def live_saves(directory: Directory, found: Iterable[str], stale_after: float) -> set[str]:
    """The first eight digits of the ids of saves that are under way, by the markers in ``found``."""
    return {
        save_id[:8]
        for name in found
        if (save_id := marker_save_id(name)) and is_live_marker(directory, name, stale_after)
    }
