"""Where a checkpoint lies: a folder or a single file of a storage."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.manifest import safe_name
from dcp_pipeline.storage.base import Directory, Storage

__all__ = ["Place", "place_of"]

_MOST_POINTER = 4096


@dataclass(frozen=True)
class Place:
    """A folder, or a file in one.

    Attributes:
        storage: that it is in.
        location: of the folder.
        file: name of the file; ``None`` for the folder.
    """

    storage: Storage
    location: str
    file: str | None = None

    @cached_property
    def directory(self) -> Directory:
        """The folder, opened."""
        return self.storage.open(self.location)

    @cached_property
    def folders(self) -> list[str]:
        """Names of the folders in it."""
        return self.storage.folders(self.location)

    @cached_property
    def names(self) -> set[str]:
        """Names of what lies in it, besides folders."""
        return set(self.directory.names()) - set(self.folders)

    def has(self, *names: str) -> bool:
        """Whether any of some files is there."""
        return any(name in self.names for name in names)

    def matching(self, pattern: re.Pattern[str], among_folders: bool = False) -> list[str]:
        """Files, or folders, whose whole names fit a pattern."""
        return sorted(
            name
            for name in (self.folders if among_folders else self.names)
            if pattern.fullmatch(name)
        )

    def below(self, folder: str) -> Place:
        """A folder in it."""
        return Place(self.storage, f"{self.location.rstrip('/')}/{folder}")

    def pointer(self, name: str) -> str:
        """The name of the folder that a file names.

        Raises:
            UnsafeCheckpointError: it leads out of this folder.
        """
        data = self.directory.read(name, 0, _MOST_POINTER)
        try:
            return safe_name(data.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise FormatError(f"{name} is no text") from error


def place_of(path: str, storage: Storage) -> Place:
    """The folder or the file that a path or URI names."""
    stem = path.rstrip("/")
    parent, slash, name = stem.rpartition("/")
    if not slash:
        parent, name = ".", stem
    is_file = (
        bool(name)
        and "://" not in name
        and not parent.endswith(":/")
        and name not in (".", "..", "~")
        and name not in storage.folders(parent or "/")
        and storage.open(parent or "/").exists(name)
    )
    return Place(storage, parent or "/", name) if is_file else Place(storage, path)
