"""Removes what no committed checkpoint needs and no live save owns; in doubt it is kept."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcp_pipeline.core.errors import CheckpointError, MissingFileError, StorageError
from dcp_pipeline.core.liveness import MARK_BYTES, ProcessIdentity
from dcp_pipeline.layout import names
from dcp_pipeline.layout.record import dead_names, is_live_marker
from dcp_pipeline.manager.claim import RUN
from dcp_pipeline.manager.steps import step_of
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.commit_lock import LOCK
from dcp_pipeline.storage.file_directory import FileSystemDirectory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.tools.needed import is_own_metadata, needed_names
from dcp_pipeline.tools.opening import look, open_directory

__all__ = ["Leftover", "PruneReport", "prune"]

_REMOVED = re.compile(r"\.removed-step-(0|[1-9]\d*)-[0-9a-f]{8}")
_ATTEMPTS = 5
_NEW_SECONDS = 60.0
_DEAD = "left by a save that never finished"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or a directory, and why it was removed or kept.

    Attributes:
        path: where it is.
        nbytes: of it, or of everything in it.
        why: one sentence.
    """

    path: str
    nbytes: int
    why: str


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What :func:`prune` did, or would do.

    Attributes:
        path: the directory.
        is_dry_run: whether nothing was changed.
        removed: what went, or would go.
        kept: what looks like a leftover and was not touched.
        failed: what could not be removed, or looked into, with the system's own error.
    """

    path: str
    is_dry_run: bool
    removed: tuple[Leftover, ...]
    kept: tuple[Leftover, ...]
    failed: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are free now, or would be."""
        return sum(leftover.nbytes for leftover in self.removed)


def prune(
    path: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    stale_after: float = 600.0,
    changes: FileChanges | None = None,
) -> PruneReport:
    """Tidy a directory of checkpoints, or a single checkpoint.

    Removed are files of saves that are neither committed nor under way, directories ``step-N`` with
    nothing else in them, the mark of a run that has ended, and what the manager has taken out of
    sight. Files of committed
    checkpoints and files that are not this package's are never touched. Safe beside live saves and
    beside another prune.

    Args:
        path: a directory, or a ``file://`` URI.
        dry_run: only say what would be removed.
        stale_after: seconds after which a save on another host that did not renew its marker is
            taken for dead; a marker may ask for more.
        changes: what makes the changes; tests replace it.

    Raises:
        ConfigError: a URI of another scheme.
        CheckpointNotFoundError: there is no such directory.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as root:
        ...     (pathlib.Path(root) / "step-5").mkdir()
        ...     _ = (pathlib.Path(root) / "step-5" / "__0_0.0badcafe.distcp").write_bytes(b"data")
        ...     report = prune(root)
        ...     print([leftover.why for leftover in report.removed], report.nbytes)
        ['left by a save that never finished', 'nothing was ever committed in it'] 4
    """
    location = open_directory(path).location
    storage = FileSystemStorage(stale_after_seconds=stale_after, changes=changes)
    pruner = _Pruner(storage, dry_run)
    try:
        pruner.run(location)
    finally:
        storage.close()
    return PruneReport(
        location, dry_run, tuple(pruner.removed), tuple(pruner.kept), tuple(pruner.failed)
    )


@dataclass
class _Pruner:
    storage: FileSystemStorage
    is_dry_run: bool
    removed: list[Leftover] = field(default_factory=list)
    kept: list[Leftover] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _durable: set[str] = field(default_factory=set)

    def run(self, location: str) -> None:
        directory = self.storage.open(location)
        self._checkpoint(directory)
        self._claim(directory)
        for name in directory.names():
            path = os.path.join(location, name)
            if os.path.islink(path) or not os.path.isdir(path):
                continue
            if _REMOVED.fullmatch(name):
                self._tree(path)
            else:
                self._checkpoint(self.storage.open(path))

    def _checkpoint(self, directory: FileSystemDirectory) -> None:
        for attempt in range(_ATTEMPTS):
            kept, removed = len(self.kept), len(self.removed)
            try:
                self._prune_directory(directory)
                return
            except MissingFileError as error:
                # A save has replaced it between two looks, or another prune was quicker.
                del self.kept[kept:]
                if self.is_dry_run:
                    del self.removed[removed:]
                if attempt == _ATTEMPTS - 1 and os.path.isdir(directory.location):
                    self.failed.append(f"{directory.location}: {error}")
            except (CheckpointError, OSError, MemoryError, RecursionError) as error:
                if os.path.isdir(directory.location):
                    self.failed.append(f"{directory.location}: {error or type(error).__name__}")
                return

    def _prune_directory(self, directory: FileSystemDirectory) -> None:
        stale_after = self.storage.stale_after
        before = look(directory, stale_after)
        self._say_who_is_alive(directory, before.names)
        try:
            dead = dead_names(directory, lambda: needed_names(directory), stale_after)
        except MissingFileError:
            raise
        except CheckpointError as error:
            if any(map(names.save_of, before.names)):
                why = f"it cannot be told what the checkpoint needs: {error}"
                self.kept.append(Leftover(directory.location, 0, why))
            return
        is_ours = before.has_manifest or before.has_metadata
        is_committed = is_ours or before.is_mega or before.is_huggingface
        old = [name for name in dead if not _is_new_text(directory, name)]
        gone = {name for name in old if self._remove(directory, name, _DEAD)}
        gone |= self._helpers(directory)
        if is_ours:
            self._say_what_is_replaced(directory)
        is_step = step_of(os.path.basename(directory.location)) is not None
        if is_step and not is_committed and not before.is_being_saved:
            left = set(directory.names()) - (gone if self.is_dry_run else set())
            self._directory(directory, left, has_lost=bool(gone))

    def _say_who_is_alive(self, directory: Directory, found: Iterable[str]) -> None:
        for name in found:
            if not is_live_marker(directory, name, self.storage.stale_after):
                continue
            try:
                owner = ProcessIdentity.parse(directory.read(name, 0, MARK_BYTES))
                age = directory.age(name)
            except CheckpointError:
                continue
            who = f"process {owner.pid} on {owner.host}" if owner else "nobody knows whom"
            why = f"a save of {who} is under way here; its mark was renewed {age:.0f} s ago"
            self.kept.append(Leftover(os.path.join(directory.location, name), 0, why))

    def _say_what_is_replaced(self, directory: Directory) -> None:
        """Files of a checkpoint that ours has replaced, when the save was killed behind that."""
        if not directory.exists(names.MANIFEST):
            self._say_what_is_lost(directory)
            return
        if directory.exists(names.METADATA) and not is_own_metadata(directory):
            why = (
                "it is of the checkpoint that was replaced, or of plain DCP: what it names is kept"
            )
            self.kept.append(Leftover(os.path.join(directory.location, names.METADATA), 0, why))
        for name in filter(names.is_plain_dcp_data, directory.names()):
            why = "data of plain DCP, which may be being written"
            self.kept.append(Leftover(os.path.join(directory.location, name), 0, why))

    def _say_what_is_lost(self, directory: Directory) -> None:
        """Data of ours that ``.metadata`` names and no manifest does."""
        if any(map(names.save_of, needed_names(directory))):
            why = "manifest.json is lost: the data that .metadata names are kept"
            self.kept.append(Leftover(directory.location, 0, why))

    def _claim(self, directory: FileSystemDirectory) -> None:
        """The mark of a run in its root, where that run is gone."""
        path = os.path.join(directory.location, RUN)
        try:
            mark, age = directory.read(RUN, 0, MARK_BYTES), directory.age(RUN)
        except MissingFileError:
            return
        except CheckpointError as error:
            self.failed.append(str(error))
            return
        owner = ProcessIdentity.parse(mark)
        is_gone = owner is not None and owner.is_gone()
        if is_gone or age > self.storage.stale_after:
            self._remove(directory, RUN, "left by a run that has ended")
            return
        who = f"process {owner.pid} on {owner.host}" if owner else "nobody knows whom"
        why = f"a run of {who} saves here; its mark was renewed {age:.0f} s ago"
        self.kept.append(Leftover(path, 0, why))

    def _make_durable(self, directory: Directory) -> None:
        """A commit record that only the cache knows must not lose what the one on disk names."""
        if directory.location not in self._durable:
            directory.sync()
            self._durable.add(directory.location)

    def _remove(self, directory: Directory, name: str, why: str) -> bool:
        path = os.path.join(directory.location, name)
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                why_not = "it is a directory, which no save makes: remove it by hand"
                self.kept.append(Leftover(path, 0, why_not))
                return False
            if not self.is_dry_run:
                self._make_durable(directory)
                directory.delete([name])
        except FileNotFoundError:
            return False  # another prune was quicker
        except OSError as error:
            self.failed.append(str(error))
            return False
        self.removed.append(Leftover(path, status.st_size, why))
        return True

    def _helpers(self, directory: FileSystemDirectory) -> set[str]:
        """The lock and the temporary files of a process that was killed while it committed."""
        records = (names.MANIFEST, names.METADATA)
        lock = directory.held_lock()
        if lock is not None:
            self.kept.append(Leftover(os.path.join(directory.location, LOCK), 0, lock))
        found = directory.stale_helpers(records)
        if found and not self.is_dry_run:
            directory.remove_stale_helpers(records)
        for name in found:
            why = "left by a process that was killed while it committed"
            self.removed.append(Leftover(os.path.join(directory.location, name), 0, why))
        return set(found)

    def _directory(self, directory: Directory, left: set[str], has_lost: bool) -> None:
        path = directory.location
        if left:
            if any(map(names.is_plain_dcp_data, left)):
                why = "it holds data of plain DCP without .metadata, which may be being written"
            else:
                shown = ", ".join(sorted(left)[:3])
                why = f"nothing was committed in it, but {shown} is not this package's"
            self.kept.append(Leftover(path, 0, why))
            return
        if not has_lost and time.time() - os.stat(path).st_mtime < self.storage.stale_after:
            self.kept.append(Leftover(path, 0, "it is empty, but was made just now"))
            return
        try:
            if not self.is_dry_run:
                self.storage.changes.remove_directory(path)
        except OSError as error:
            # A save that starts here at this moment has put its mark into it.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return
        self.removed.append(Leftover(path, 0, "nothing was ever committed in it"))

    def _tree(self, path: str) -> None:
        nbytes = _tree_bytes(path)
        try:
            if not self.is_dry_run:
                self.storage.changes.remove_tree(path)
        except OSError as error:
            self.failed.append(f"{path}: {error}")
            return
        self.removed.append(Leftover(path, nbytes, "the manager had taken it out of sight"))


def _is_new_text(directory: Directory, name: str) -> bool:
    """Whether a file may be about to become the marker of a save that begins at this moment."""
    if not name.endswith(".tmp"):
        return False
    try:
        owner = ProcessIdentity.parse(directory.read(name, 0, MARK_BYTES))
        return not (owner is not None and owner.is_gone()) and directory.age(name) < _NEW_SECONDS
    except MissingFileError:
        return True
    except CheckpointError as error:
        # No save makes a pipe, a folder, or what cannot be read as what it is.
        if isinstance(error, StorageError) and error.errno != errno.ELOOP:
            raise
        return False


def _tree_bytes(path: str) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total
