"""Opens a checkpoint to look at it: what is there, and what it says of itself.

Torch is imported for checkpoints of plain DCP alone, whose metadata are a pickle.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout import names
from dcp_pipeline.layout.mega_reading import mega_manifest
from dcp_pipeline.layout.record import is_live_marker, is_overwritten_by_dcp
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.filesystem import FileSystemStorage

__all__ = [
    "OVERWRITTEN",
    "Found",
    "State",
    "is_ours",
    "look",
    "open_directory",
    "read_manifest",
    "state_of",
]

_HUGGING_FACE = re.compile(
    r"[^.].*\.safetensors(?:\.index\.json)?|(?:pytorch|adapter)_model\.bin(?:\.index\.json)?"
)

OVERWRITTEN = (
    "plain DCP has saved over the checkpoint of manifest.json: what is shown is DCP's. A load"
    " refuses both until layout.on_foreign_overwrite chooses one"
)


class State(StrEnum):
    """What is in the directory of a checkpoint."""

    COMMITTED = "committed"
    """A save of ours was committed."""
    FOREIGN = "foreign"
    """A checkpoint of plain DCP, or one that plain DCP has written over ours; MEGA files; a
    Hugging Face model."""
    IN_PROGRESS = "in progress"
    """Nothing was committed yet, and a save is under way."""
    INCOMPLETE = "incomplete"
    """There are data, but nothing was committed and no save is under way."""
    DAMAGED = "damaged"
    """The commit record cannot be read, or is lost while ``.metadata`` of ours is there; in a
    listing also where a file that it names is missing or has another size."""


@dataclass(frozen=True, slots=True)
class Found:
    """The names in a directory, sorted, and what they come to.

    Attributes:
        names: of its files and folders.
        is_being_saved: whether a live save has left its marker.
    """

    names: tuple[str, ...]
    is_being_saved: bool

    @property
    def has_manifest(self) -> bool:
        """Whether there is a commit record of ours."""
        return names.MANIFEST in self.names

    @property
    def has_metadata(self) -> bool:
        """Whether there is a ``.metadata`` of DCP's, or those of its ranks."""
        return names.METADATA in self.names or bool(names.metadata_ranks(self.names))

    @property
    def is_mega(self) -> bool:
        """Whether there are MEGA files, and no commit record of ours or of DCP's."""
        if self.has_manifest or self.has_metadata:
            return False
        return any(name.endswith(".mega") and not names.is_data(name) for name in self.names)

    @property
    def is_huggingface(self) -> bool:
        """Whether there are the files of a Hugging Face model, and no commit record of others."""
        if self.has_manifest or self.has_metadata or self.is_mega:
            return False
        return any(_HUGGING_FACE.fullmatch(n) and not names.is_data(n) for n in self.names)

    @property
    def is_checkpoint(self) -> bool:
        """Whether a checkpoint was ever begun here."""
        return (
            self.has_manifest
            or self.has_metadata
            or self.is_mega
            or self.is_huggingface
            or self.is_being_saved
            or any(map(names.is_data, self.names))
        )


def open_directory(path: str | os.PathLike[str]) -> Directory:
    """The directory that a path or a ``file://`` URI names.

    Raises:
        ConfigError: a URI that a program of its own cannot look into.
        CheckpointNotFoundError: there is no such directory.
    """
    text = os.fspath(path)
    if text.startswith("memory://"):
        raise ConfigError(
            f"{text} lies in the memory of the process that saved it, where no other program can"
            " look; expected a path or a file:// URI"
        )
    directory = FileSystemStorage().open(text)
    if not os.path.isdir(directory.location):
        what = "is not a directory" if os.path.lexists(directory.location) else "is not there"
        raise CheckpointNotFoundError(f"{directory.location} {what}", directory.location)
    return directory


def look(directory: Directory, stale_after: float = 600.0) -> Found:
    """List a directory.

    Args:
        stale_after: seconds after which a save that did not renew its marker counts as dead.

    Raises:
        StorageError: it cannot be listed.
    """
    with _system_errors(directory.location):
        listed = tuple(directory.names())
    return Found(listed, any(is_live_marker(directory, name, stale_after) for name in listed))


def read_manifest(directory: Directory, found: Found) -> Manifest:
    """What a checkpoint holds, ours, plain DCP's or of others' files; the newer of the first two.

    Raises:
        CheckpointNotFoundError: there is none.
        IncompleteCheckpointError: a save was begun and never committed.
        CorruptCheckpointError: naming the file that is damaged.
    """
    if found.has_manifest:
        manifest = _decoded(directory)
        if not (found.has_metadata and is_overwritten_by_dcp(manifest, directory)):
            return manifest
    if found.has_metadata:
        return _plain_dcp(directory, found)
    if found.is_mega:
        with _named(directory):
            return mega_manifest(directory)
    if found.is_huggingface:
        return huggingface_manifest(directory)
    raise _nothing(directory, found)


def huggingface_manifest(directory: Directory) -> Manifest:
    """What the files of a Hugging Face model hold."""
    from dcp_pipeline.layout.huggingface_reading import manifest_of, read_repository

    with _named(directory):
        return manifest_of(read_repository(linked(directory)), directory.location)


def linked(directory: Directory) -> Directory:
    """The same directory, whose files may be links that lead out of it: a cache is made of them."""
    return FileSystemStorage().open(directory.location, follow_links=True)


def is_ours(manifest: Manifest) -> bool:
    """Whether a save of this package has written it, in files of its own."""
    return not manifest.is_foreign and manifest.layout not in ("huggingface", "mega")


def state_of(directory: Directory, found: Found) -> tuple[State, Manifest | None, str]:
    """The state of a directory, its manifest if that can be read, and what is wrong with it."""
    try:
        manifest = read_manifest(directory, found)
    except IncompleteCheckpointError:
        return (State.IN_PROGRESS if found.is_being_saved else State.INCOMPLETE), None, ""
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        return State.DAMAGED, None, str(error)
    if is_ours(manifest):
        return State.COMMITTED, manifest, ""
    return State.FOREIGN, manifest, OVERWRITTEN if found.has_manifest else ""


def _decoded(directory: Directory) -> Manifest:
    with _named(directory):
        return Manifest.decode(directory.read(names.MANIFEST))


def _plain_dcp(directory: Directory, found: Found) -> Manifest:
    from dcp_pipeline.layout.plain_dcp import lost_record, plain_manifest

    with _named(directory):
        manifest = plain_manifest(directory)
    lost = lost_record(manifest, directory.location)
    if lost is None:
        return manifest
    if not found.has_manifest and directory.exists(names.MANIFEST):
        return _decoded(directory)  # a first save was committed since the directory was listed
    raise lost


def _nothing(directory: Directory, found: Found) -> CheckpointNotFoundError:
    location = directory.location
    if not found.is_checkpoint:
        return CheckpointNotFoundError(f"{location} has no checkpoint in it", location)
    how = "a save into it is under way" if found.is_being_saved else "its save never finished"
    return IncompleteCheckpointError(f"the checkpoint in {location} is incomplete: {how}", location)


@contextlib.contextmanager
def _named(directory: Directory) -> Iterator[None]:
    """Put the directory into the message of what is wrong with a file in it."""
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, CorruptCheckpointError | ValueError) and (
            directory.location not in str(error)
        ):
            error.args = (f"{directory.location}: {error}", *error.args[1:])
        raise


@contextlib.contextmanager
def _system_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise StorageError(f"{path}: {error.strerror or error}", path, error.errno) from error
