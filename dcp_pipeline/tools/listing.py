"""The checkpoints below a directory, and what state each is in."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from dcp_pipeline.core.errors import CheckpointError, CheckpointNotFoundError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout import names
from dcp_pipeline.manager.steps import PINNED, step_of
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.tools.inspect import FileInfo, files_of
from dcp_pipeline.tools.opening import Found, State, is_ours, look, open_directory, state_of

__all__ = ["CheckpointInfo", "Listing", "list_directory"]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint in a directory of checkpoints.

    Attributes:
        name: of its folder, ``.`` for the directory itself.
        path: of its folder.
        state: whether it can be loaded, as far as the sizes of its files tell.
        is_being_saved: whether a save into it is under way; it may be committed already.
        step: ``N`` where the folder is called ``step-N``.
        save_id: of a checkpoint of ours.
        age_seconds: since it was committed, or last written to.
        nbytes: on disk, of all files in the folder.
        keys: how many it holds, ``None`` where nothing was committed.
        problem: what is wrong, empty where nothing is.
        is_pinned: whether somebody has said that it stays.
    """

    name: str
    path: str
    state: State
    is_being_saved: bool
    step: int | None
    save_id: str | None
    age_seconds: float
    nbytes: int
    keys: int | None
    problem: str
    is_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """What a directory holds: checkpoints, or, where it is one itself, the files of that one.

    Attributes:
        path: of the directory.
        checkpoints: by step, then by name; the directory itself comes first.
        files: of the one checkpoint, ``None`` for a directory of checkpoints.
    """

    path: str
    checkpoints: tuple[CheckpointInfo, ...]
    files: tuple[FileInfo, ...] | None = None


def list_directory(path: str | os.PathLike[str]) -> Listing:
    """List the checkpoints in ``path``, or the files of the checkpoint that it is.

    Raises:
        ConfigError: a URI of another scheme than ``file``.
        CheckpointNotFoundError: there is no such directory.
        StorageError: it cannot be read.
    """
    directory = open_directory(path)
    own = look(directory)
    inner = [info for name in own.names if (info := _below(directory, name)) is not None]
    inner.sort(key=_order)
    if not own.is_checkpoint:
        return Listing(directory.location, tuple(inner))
    itself = _describe(directory, own, ".")
    if inner:
        return Listing(directory.location, (itself, *inner))
    try:
        manifest = state_of(directory, own)[1]
    except CheckpointError:
        manifest = None
    return Listing(directory.location, (itself,), tuple(files_of(directory, own, manifest)))


def _order(info: CheckpointInfo) -> tuple[int, int, str]:
    return (0, info.step, info.name) if info.step is not None else (1, 0, info.name)


def _below(parent: Directory, name: str) -> CheckpointInfo | None:
    path = os.path.join(parent.location, name)
    if not os.path.isdir(path):
        return None
    directory = FileSystemStorage().open(path)
    try:
        found = look(directory)
        return _describe(directory, found, name) if found.is_checkpoint else None
    except CheckpointNotFoundError:
        return None  # it has gone since it was listed
    except (CheckpointError, OSError, MemoryError, RecursionError) as error:
        # One that cannot be looked into does not hide the others.
        problem = str(error) or type(error).__name__
        return CheckpointInfo(
            name, path, State.DAMAGED, False, step_of(name), None, 0.0, 0, None, problem
        )


def _describe(directory: Directory, found: Found, name: str) -> CheckpointInfo:
    state, manifest, problem = state_of(directory, found)
    if manifest is not None and not problem and _wrong_sizes(directory, found, manifest):
        # One that is replaced meanwhile loses the files of before: it is looked at again.
        found = look(directory)
        state, manifest, problem = state_of(directory, found)
        if manifest is not None and not problem:
            problem = _wrong_sizes(directory, found, manifest)
            state = State.DAMAGED if problem else state
    sizes, newest = _sizes(directory, found)
    own = manifest if manifest is not None and is_ours(manifest) else None
    since = newest if own is None else own.created
    return CheckpointInfo(
        name=name,
        path=directory.location,
        state=state,
        is_being_saved=found.is_being_saved,
        step=step_of(os.path.basename(directory.location)),
        save_id=None if own is None else own.save_id,
        age_seconds=max(0.0, time.time() - since),
        nbytes=sizes,
        keys=None if manifest is None else len(manifest.names),
        problem=problem,
        is_pinned=PINNED in found.names,
    )


def _wrong_sizes(directory: Directory, found: Found, manifest: Manifest) -> str:
    """The first file that is missing or has another size than was written, empty if none is."""
    named = {file.name for file in manifest.files} | {sums.name for sums in manifest.sums}
    files = [file for file in files_of(directory, found, manifest) if file.name in named]
    return next((file.problem for file in files if file.problem), "")


def _sizes(directory: Directory, found: Found) -> tuple[int, float]:
    """Bytes of all files, and when the newest thing that counts was written."""
    total, times = 0, []
    for name in found.names:
        try:
            status = os.stat(os.path.join(directory.location, name))
        except OSError:
            continue
        if os.path.isdir(os.path.join(directory.location, name)):
            continue
        total += status.st_size
        times.append((name == names.METADATA, status.st_mtime))
    committed = [when for is_record, when in times if is_record]
    return total, max(committed or [when for _, when in times], default=time.time())
