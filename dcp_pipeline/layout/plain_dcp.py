"""A directory that plain DCP has saved into, as a manifest.

Its commit record is ``.metadata``. A save with ``use_collectives=False`` has none: every rank
leaves ``__{rank}.metadata`` about what it has written itself, replicas included. They are read
together, and make a checkpoint where no rank's is lacking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingFileError,
    list_some,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.metadata_pickle import read_metadata
from dcp_pipeline.layout import names
from dcp_pipeline.layout.dcp_metadata import manifest_of, manifest_of_ranks
from dcp_pipeline.storage.base import Directory

__all__ = ["DataSizes", "lost_record", "plain_manifest"]


class DataSizes(Mapping[str, int]):
    """Bytes of the data files in a directory, each looked at when it is asked for.

    Asking raises ``UnsafeCheckpointError`` for what is no file, or leads out of the directory.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __getitem__(self, name: str) -> int:
        if not names.is_data(name):
            raise KeyError(name)
        try:
            with self._directory.open(name) as source:
                return source.size
        except MissingFileError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return filter(names.is_data, self._directory.names())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def plain_manifest(directory: Directory) -> Manifest:
    """What a checkpoint of plain DCP holds; a file that is not there has the size -1.

    Raises:
        MissingFileError: there is no metadata of DCP's.
        IncompleteCheckpointError: the metadata of some ranks are there, those of others not.
        CorruptCheckpointError: the metadata contradict themselves or one another.
    """
    found = directory.names()
    sizes = DataSizes(directory)
    ranks = names.metadata_ranks(found)
    if names.METADATA in found or not ranks:
        manifest = manifest_of(read_metadata(directory.read(names.METADATA)), sizes)
        problems = _tiling_problems(manifest)
        if problems:
            raise CorruptCheckpointError(f"{directory.location}: .metadata is damaged: {problems}")
        return manifest
    lacking = sorted(set(range(max(ranks))) - set(ranks))
    if lacking:
        raise IncompleteCheckpointError(
            f"the checkpoint in {directory.location}, saved with use_collectives=False, is"
            f" incomplete: ranks {list_some(ranks)} have left their metadata, ranks"
            f" {list_some(lacking)} have not",
            directory.location,
        )
    metadata = [read_metadata(directory.read(names.rank_metadata_name(rank))) for rank in ranks]
    manifest = manifest_of_ranks(metadata, sizes)
    problems = _tiling_problems(manifest)
    if problems:
        raise IncompleteCheckpointError(
            f"the checkpoint in {directory.location}, saved with use_collectives=False, is"
            f" incomplete or of several saves: the chunks of ranks 0 to {ranks[-1]} do not tile the"
            f" state: {problems}",
            directory.location,
        )
    return manifest


def lost_record(manifest: Manifest, location: str) -> CorruptCheckpointError | None:
    """What is wrong where DCP's metadata name data files of ours; ``None`` for plain DCP's own.

    A save of ours puts ``manifest.json`` in place before ``.metadata``, so the one without the
    other is damage: bytes would be read that nobody can verify. Plain DCP never names files so.
    """
    saves = sorted({save for file in manifest.files if (save := names.save_of(file.name))})
    if not saves:
        return None
    return CorruptCheckpointError(
        f"{location}: {names.METADATA} is of the save {saves[0]} of this package, and its"
        f" {names.MANIFEST} is missing, without which no byte can be verified. Restore it from a"
        " copy, or load the step before; layout.on_foreign_overwrite=metadata opens the data all"
        " the same, unverified"
    )


def _tiling_problems(manifest: Manifest) -> str:
    return "; ".join(tiling_problems(manifest.table, np.zeros(len(manifest.names), bool)))
