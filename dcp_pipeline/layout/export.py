"""Layouts whose files have names and contents that others have laid down.

What such a directory holds is told by its files themselves, with no manifest of ours beside them.
Files are written under names that nobody takes for a model, and get their own in the commit.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.fingerprint import Fingerprint
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.layout import names
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.storage.base import Directory

__all__ = ["ExportLayout", "PlannedFile", "Publication", "is_export_part", "part_name"]

_PART: Final = re.compile(r"\..+\.([0-9a-f]{8})\.part")
_MARKER: Final = re.compile(r"\.saving-([0-9a-f]{8})[0-9a-f]{24}\.json(?:\.[0-9a-f]{8}\.tmp)?")


def is_export_part(name: str) -> bool:
    """Whether a file of this name is of an export that is under way, or was broken off."""
    return bool(_PART.fullmatch(name) or _MARKER.fullmatch(name))


def part_name(final: str, save_id: str) -> str:
    """What a file is called until the commit."""
    return f".{final}.{save_id[:8]}.part"


@dataclass(frozen=True)
class PlannedFile:
    """A file of which everything but the elements is known before anything is written.

    Attributes:
        part: its name until the commit.
        final: its name behind it.
        size: bytes.
        keys: which keys of the plan lie in it.
        starts: where the elements of each start, in bytes from the start of the file.
    """

    part: str
    final: str
    size: int
    keys: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Publication:
    """What a commit does to the directory; see :meth:`Directory.adopt`."""

    files: Sequence[tuple[str, str]]
    record: tuple[str, bytes] | None
    removed: Sequence[str]


class ExportLayout(Layout):
    """A layout of files that others read.

    Attributes:
        shares_files: whether ranks write their ranges of files that are planned for all of them,
            or each its own files.
        writes_ties: whether a tensor that shares another's memory is written again.
    """

    is_export: ClassVar[bool] = True
    shares_files: ClassVar[bool]
    writes_ties: bool = False

    def sums_name(self, rank: int, save_id: str) -> str:
        raise CheckpointError(f"layout {self.kind!r} has no files with digests")

    def marker_name(self, save_id: str) -> str:
        return names.marker_name(save_id)

    def save_of(self, name: str) -> str | None:
        match = _PART.fullmatch(name) or _MARKER.fullmatch(name)
        return match[1] if match else None

    def companions(
        self, manifest: Manifest, location: str, dcp_reads: bool
    ) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
        return manifest, []

    def current(self, directory: Directory) -> tuple[bytes | None, str | None]:
        tokens = self.watched(directory)
        found = sorted(name for name, token in tokens.items() if token is not None)
        return ("\n".join(found).encode() if found else None), None

    def replaced_names(self, directory: Directory) -> Collection[str]:
        return ()

    def needed(self, directory: Directory) -> Collection[str]:
        return ()

    @abstractmethod
    def watched(self, directory: Directory) -> dict[str, str | None]:
        """The names whose files say what is committed, and the tokens that they have now."""

    @abstractmethod
    def plan_files(
        self,
        directory: Directory,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: bool,
    ) -> list[PlannedFile]:
        """On the coordinator, where ranks share files: what lies where.

        Args:
            keys, specs: of the state, in its order; aliases have no elements of their own.
            fingerprint: whether the fingerprints of the values are going to be known.

        Raises:
            UnsupportedLeafError: naming every key that the format cannot hold.
        """

    @abstractmethod
    def header(
        self,
        file: PlannedFile,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: Fingerprint | None,
    ) -> bytes:
        """The bytes of a planned file in front of its elements."""

    def attachments(self) -> list[tuple[str, bytes]]:
        """Names and contents of small files that are published with the others."""
        return []

    def named(self, directory: Directory, manifest: Manifest) -> tuple[Manifest, dict[str, str]]:
        """Where each rank makes its own files: their final names, and those they have by now."""
        raise CheckpointError(f"the ranks share the files of layout {self.kind!r}")

    @abstractmethod
    def publication(
        self,
        directory: Directory,
        manifest: Manifest,
        files: Mapping[str, str],
        planned: Sequence[PlannedFile],
    ) -> Publication:
        """How the commit makes the files of a manifest count.

        Args:
            manifest: of the new checkpoint, with its files' final names.
            files: the name of each until then, by final name; attachments among them.
            planned: files that ranks share.
        """
