"""How a checkpoint is laid out in a directory: the interface of a kind of layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.names import is_plain_dcp_data
from dcp_pipeline.storage.base import Directory

__all__ = ["Layout"]


class Layout(ABC):
    """A kind of layout: file names, and what the commit record is.

    Attributes:
        kind: its name in the config and in a manifest.
        record: the file whose replacement commits a checkpoint.
        follows_links: whether files are read through links that lead out of the directory.
        checksum: algorithm of the block digests; empty where there are none.
        block_bytes: bytes per block.
        keeps_notes: whether a checkpoint holds the notes that a manager makes of its step.
        is_export: whether its files are laid down by others, see
            :class:`~dcp_pipeline.layout.export.ExportLayout`.
    """

    kind: ClassVar[str]
    record: ClassVar[str]
    follows_links: ClassVar[bool] = False
    is_export: ClassVar[bool] = False
    keeps_notes: ClassVar[bool] = True
    checksum: str
    block_bytes: int

    @abstractmethod
    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        """The name of a rank's ``number``-th data file; no other save uses it."""

    @abstractmethod
    def sums_name(self, rank: int, save_id: str) -> str:
        """The name of the file with the digests of a rank's data files."""

    @abstractmethod
    def marker_name(self, save_id: str) -> str:
        """The name of the file that says that a save is under way."""

    @abstractmethod
    def open(self, directory: Directory) -> Manifest:
        """Read the commit record.

        Raises:
            CheckpointNotFoundError: there is none.
            IncompleteCheckpointError: there is data, but no save was ever committed.
            ForeignOverwriteError: plain DCP has saved over our checkpoint.
        """

    @abstractmethod
    def companions(
        self, manifest: Manifest, location: str, dcp_reads: bool
    ) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
        """What is replaced after the commit record; the manifest with these written in.

        Returns:
            The manifest to commit, and ``(name, bytes or None to remove)`` in order.
        """

    @abstractmethod
    def current(self, directory: Directory) -> tuple[bytes | None, str | None]:
        """What a new save replaces: the record's bytes, the digest of a superseded companion."""

    @abstractmethod
    def replaced_names(self, directory: Directory) -> Collection[str]:
        """Names that the checkpoint in the directory owns, for deletion once it is replaced."""

    @property
    def records(self) -> tuple[str, ...]:
        """Files any one of which makes a directory a committed checkpoint of this layout."""
        return (self.record,)

    @abstractmethod
    def needed(self, directory: Directory) -> Collection[str]:
        """The files that the committed checkpoint names, none of which may be removed.

        Raises:
            CheckpointError: that cannot be told.
        """

    def may_be_left(self, name: str) -> bool:
        """Whether a save that was killed can leave a file of this name that names no save."""
        return is_plain_dcp_data(name)

    @abstractmethod
    def committed_save(self, directory: Directory) -> str | None:
        """The id of the save that is committed; ``None`` where nothing tells it."""

    @abstractmethod
    def save_of(self, name: str) -> str | None:
        """The first eight digits of the save id in a name that this layout makes, else ``None``."""
