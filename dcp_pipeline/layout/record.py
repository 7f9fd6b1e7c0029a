"""What the files of a directory say about its saves, torch-free."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import Final

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import CheckpointError, MissingFileError
from dcp_pipeline.core.liveness import MARK_BYTES, ProcessIdentity, is_given_up
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.names import MANIFEST, METADATA, marker_save_id, save_of
from dcp_pipeline.storage.base import Directory

__all__ = ["dead_names", "is_live_marker", "is_overwritten_by_dcp", "live_saves", "names_in"]

_TAIL_BYTES: Final = 4096
_LONGEST_LIMIT: Final = 7 * 86_400.0


def is_overwritten_by_dcp(manifest: Manifest, directory: Directory) -> bool:
    """Whether ``.metadata`` belongs to a save that the manifest knows nothing of."""
    try:
        if not directory.exists(METADATA) or _is_metadata_of(manifest, directory):
            return False
        # Another save may have replaced both since the manifest was read.
        return Manifest.decode(directory.read(MANIFEST)).save_id == manifest.save_id
    except MissingFileError:
        return False


def _is_metadata_of(manifest: Manifest, directory: Directory) -> bool:
    written = manifest.metadata
    if written is not None and directory.size(METADATA) == written.size:
        # The pickle ends with the save id; reading all of it would take long at scale.
        tail = directory.read(METADATA, -_TAIL_BYTES, _TAIL_BYTES)
        if manifest.save_id.encode() in tail:
            return True
    digest = digest_of("xxh3_64", directory.read(METADATA)).hex()
    return digest in (manifest.superseded, None if written is None else written.digest)


def is_live_marker(directory: Directory, name: str, stale_after: float) -> bool:
    """Whether a file is the marker of a save that is under way.

    Args:
        stale_after: seconds after which a marker that was not renewed is of a dead save, unless
            it asks for more itself.
    """
    if marker_save_id(name) is None or is_given_up(name):
        return False
    try:
        content = directory.read(name, 0, MARK_BYTES)
        age = directory.age(name)
    except CheckpointError:
        return False
    if not content.strip(b"\0"):
        return False  # it had its bytes when it got its name: the power has been lost since
    owner = ProcessIdentity.parse(content)
    limit = max(stale_after, _own_limit(content))
    return not (owner is not None and owner.is_gone()) and age <= limit


def _own_limit(marker: bytes) -> float:
    """How seldom a save renews its marker is its config's to say, not that of who looks at it."""
    try:
        limit = json.loads(marker)["stale_after"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
    return min(limit, _LONGEST_LIMIT) if is_number and limit > 0 else 0.0


def live_saves(directory: Directory, found: Iterable[str], stale_after: float) -> set[str]:
    """The first eight digits of the ids of saves under way, by the markers in ``found``."""
    return {
        save_id[:8]
        for name in found
        if (save_id := marker_save_id(name)) and is_live_marker(directory, name, stale_after)
    }


def names_in(manifest: Manifest) -> set[str]:
    """The files that a commit record names."""
    return {file.name for file in manifest.files} | {sums.name for sums in manifest.sums}


def dead_names(
    directory: Directory,
    needed: Callable[[], Collection[str]],
    stale_after: float,
    save_of: Callable[[str], str | None] = save_of,
    own: str = "",
) -> list[str]:
    """The files of saves that are neither committed nor under way, markers first.

    Safe beside other saves: a save has its marker before it has any other file, and is committed
    before the marker goes. So files are listed first, then markers, then the commit record is read.
    The marker has to be removed before the rest, since a save that finds its own gone gives up.

    Args:
        needed: reads what the committed checkpoint names; called last.
        stale_after: as in :func:`is_live_marker`.
        own: first eight digits of the id of the caller's own save.
    """
    listed = directory.names()
    alive = live_saves(directory, directory.names(), stale_after) | {own}
    kept = needed()
    dead = [
        name
        for name in listed
        if (save := save_of(name)) is not None and save not in alive and name not in kept
    ]
    return sorted(dead, key=lambda name: marker_save_id(name) is None)
