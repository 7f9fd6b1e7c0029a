"""Which files in a directory some commit record needs."""

from __future__ import annotations

import contextlib

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout import names
from dcp_pipeline.layout.record import names_in
from dcp_pipeline.storage.base import Directory

__all__ = ["is_own_metadata", "needed_names"]


def needed_names(directory: Directory) -> set[str]:
    """Names that some commit record in the directory needs.

    Raises:
        CheckpointError: a record cannot be read, so that anything may be needed.
    """
    needed: set[str] = set()
    listed = directory.names()
    records = [names.rank_metadata_name(rank) for rank in names.metadata_ranks(listed)]
    is_dcp = names.METADATA in listed
    if names.MANIFEST in listed:
        needed |= names_in(Manifest.decode(directory.read(names.MANIFEST)))
        is_dcp = is_dcp and not is_own_metadata(directory)
    for record in [*records, *([names.METADATA] if is_dcp else [])]:
        with contextlib.suppress(MissingFileError):
            needed |= _named_by(directory.read(record))
    # Whoever has lost the manifest may find it again: the digests of what .metadata names stay.
    saves = {save for name in needed if (save := names.save_of(name)) is not None}
    sums = {name for name in listed if name.endswith(".sums") and names.save_of(name) in saves}
    return needed | sums


def is_own_metadata(directory: Directory) -> bool:
    """Whether ``.metadata`` is the one that was committed with the manifest."""
    entry = Manifest.decode(directory.read(names.MANIFEST)).metadata
    data = directory.read(names.METADATA)
    found = (len(data), digest_of("xxh3_64", data).hex())
    return entry is not None and found == (entry.size, entry.digest)


def _named_by(metadata: bytes) -> set[str]:
    from dcp_pipeline.formats.metadata_pickle import read_metadata

    stored = read_metadata(metadata).storage_data or {}
    return {str(info.relative_path) for info in stored.values()}
