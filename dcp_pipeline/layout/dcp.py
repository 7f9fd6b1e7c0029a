"""Layout ``dcp``: a directory that plain DCP opens, with a manifest that commits it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    ForeignOverwriteError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
)
from dcp_pipeline.core.manifest import Manifest, MetadataEntry, check_places
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.metadata_pickle import read_metadata, write_metadata
from dcp_pipeline.layout import names
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.layout.dcp_metadata import metadata_of
from dcp_pipeline.layout.plain_dcp import lost_record, plain_manifest
from dcp_pipeline.layout.record import is_overwritten_by_dcp, names_in
from dcp_pipeline.storage.base import Directory

__all__ = ["DcpLayout"]


class DcpLayout(Layout):
    """One directory per checkpoint, described in ``docs/format.md``.

    Args:
        metadata: write DCP's ``.metadata`` too, where the serialization allows it.
        checksum: algorithm of the block digests.
        block_bytes: bytes per block; what a partial read verifies at least.
        on_foreign_overwrite: what to open where plain DCP has saved over our checkpoint: nothing
            (``error``), ours (``manifest``) or DCP's (``metadata``). The last also opens a
            ``.metadata`` of ours whose manifest is lost, unverified.
    """

    kind: ClassVar[str] = "dcp"
    record: ClassVar[str] = names.MANIFEST

    def __init__(
        self,
        metadata: bool = True,
        checksum: str = "xxh3_64",
        block_bytes: int = 64 << 10,
        on_foreign_overwrite: Literal["error", "manifest", "metadata"] = "error",
    ) -> None:
        self.checksum = checksum
        self.block_bytes = block_bytes
        self._metadata = metadata
        self._on_foreign_overwrite = on_foreign_overwrite

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        return names.data_name(rank, number, save_id, extension)

    def sums_name(self, rank: int, save_id: str) -> str:
        return names.sums_name(rank, save_id)

    def marker_name(self, save_id: str) -> str:
        return names.marker_name(save_id)

    def save_of(self, name: str) -> str | None:
        return names.save_of(name)

    def open(self, directory: Directory) -> Manifest:
        try:
            manifest = Manifest.decode(directory.read(names.MANIFEST))
        except MissingFileError:
            plain = self._open_plain(directory)
            if self._on_foreign_overwrite == "metadata":
                return plain
            lost = lost_record(plain, directory.location)
            if lost is None:
                return plain
            try:  # once more: a first save may have been committed between the two looks
                manifest = Manifest.decode(directory.read(names.MANIFEST))
            except MissingFileError:
                raise lost from None
        _check_chunks(manifest, directory)
        if not is_overwritten_by_dcp(manifest, directory):
            return manifest
        if self._on_foreign_overwrite == "manifest":
            return manifest
        if self._on_foreign_overwrite == "metadata":
            return self._open_plain(directory)
        raise ForeignOverwriteError(
            f"{directory.location} holds two checkpoints: {names.MANIFEST} of save"
            f" {manifest.save_id}, and a {names.METADATA} that plain torch.distributed.checkpoint"
            " wrote over it later. layout.on_foreign_overwrite=manifest opens the first,"
            " =metadata the second"
        )

    def _open_plain(self, directory: Directory) -> Manifest:
        """A checkpoint of plain DCP, committed when its metadata is there."""
        try:
            manifest = plain_manifest(directory)
        except MissingFileError:
            raise _nothing_there(directory) from None
        for entry in manifest.files:
            if entry.size < 0:
                raise MissingFileError(
                    f"{entry.name}, which DCP's metadata name, is not in {directory.location}",
                    entry.name,
                )
        check_places(manifest)
        return manifest

    def companions(
        self, manifest: Manifest, location: str, dcp_reads: bool
    ) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
        if not (self._metadata and dcp_reads):
            return manifest, [(names.METADATA, None)]
        data = write_metadata(metadata_of(manifest, location))
        entry = MetadataEntry(len(data), digest_of("xxh3_64", data).hex())
        return replace(manifest, metadata=entry), [(names.METADATA, data)]

    def current(self, directory: Directory) -> tuple[bytes | None, str | None]:
        record = metadata = None
        if directory.exists(names.MANIFEST):
            record = directory.read(names.MANIFEST)
        for name in (names.METADATA, names.rank_metadata_name(0)):
            if metadata is None and directory.exists(name):
                metadata = digest_of("xxh3_64", directory.read(name)).hex()
        return record, metadata

    def needed(self, directory: Directory) -> Collection[str]:
        if not directory.exists(names.MANIFEST):
            return ()
        return names_in(Manifest.decode(directory.read(names.MANIFEST)))

    def committed_save(self, directory: Directory) -> str | None:
        return Manifest.decode(directory.read(names.MANIFEST)).save_id

    def replaced_names(self, directory: Directory) -> Collection[str]:
        """Every plain DCP file, once our manifest has replaced ``.metadata``.

        Files of ours are told by their save id; DCP's names carry none, so they are taken before
        the commit from the metadata that are about to be superseded.
        """
        of_ranks = [names.rank_metadata_name(r) for r in names.metadata_ranks(directory.names())]
        found = set(of_ranks)
        for record in (names.METADATA, *of_ranks):
            found |= _named_by(directory, record)
        return found


def _check_chunks(manifest: Manifest, directory: Directory) -> None:
    """No save commits chunks that do not tile the state; a load of them would be silently wrong."""
    is_alias = np.asarray([spec.alias >= 0 for spec in manifest.table.keys], bool)
    problems = tiling_problems(manifest.table, is_alias)
    if problems:
        raise FormatError(
            f"{names.MANIFEST} in {directory.location} is damaged: {'; '.join(problems)}"
        )


def _named_by(directory: Directory, record: str) -> set[str]:
    """The data files of plain DCP that one of its metadata files names."""
    if not directory.exists(record):
        return set()
    try:
        if (
            record == names.METADATA
            and directory.exists(names.MANIFEST)
            and not is_overwritten_by_dcp(
                Manifest.decode(directory.read(names.MANIFEST)), directory
            )
        ):
            return set()
        metadata = read_metadata(directory.read(record))
        stored = (metadata.storage_data or {}).values()
        found = {str(info.relative_path) for info in stored}
    except Exception:
        # What cannot be read names nothing that may be deleted.
        return set()
    return {name for name in found if names.is_plain_dcp_data(name)}


def _nothing_there(directory: Directory) -> CheckpointNotFoundError:
    found = directory.names()
    if any(names.is_data(name) for name in found):
        return IncompleteCheckpointError(
            f"the checkpoint in {directory.location} is incomplete: its data was being written, but"
            " no save was ever committed",
            directory.location,
        )
    what = "no checkpoint in it" if found else "nothing there"
    return CheckpointNotFoundError(f"{directory.location}: {what}", directory.location)
