"""What lies in the root directory of a run; looked at by the coordinator alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingFileError,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout import names
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.layout.record import live_saves
from dcp_pipeline.manager.damage import is_damage
from dcp_pipeline.manager.retention import StepRecord
from dcp_pipeline.manager.steps import PINNED, step_name, step_of
from dcp_pipeline.storage.base import Directory, Storage

__all__ = ["Root", "Summary"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What a manager needs to know of a checkpoint.

    Attributes:
        is_foreign: whether plain DCP has written it.
        files: name to size in bytes of everything that its record names; -1 where that is not
            recorded.
        notes, config, versions, world_size: as in :class:`Manifest`.
    """

    is_foreign: bool
    files: Mapping[str, int]
    notes: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    world_size: int

    @classmethod
    def of(cls, manifest: Manifest) -> Summary:
        """The summary of a manifest, without its table."""
        files = {entry.name: entry.size for entry in manifest.files}
        files |= {entry.name: entry.size for entry in manifest.sums}
        return cls(
            manifest.is_foreign,
            files,
            manifest.notes,
            manifest.config,
            manifest.versions,
            manifest.world_size,
        )

    def score(self, metric: str | None) -> float | None:
        """The metric that this was saved with, ``None`` where it has none that is a number."""
        metrics = self.notes.get("metrics")
        value = metrics.get(metric) if isinstance(metrics, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)


class Root:
    """The steps below a directory.

    Args:
        location: path or URI.
        storage: where it is.
        layout: how a checkpoint lies in its directory.

    Attributes:
        location: as the storage names it.
        directory: the root itself.
    """

    def __init__(self, location: str, storage: Storage, layout: Layout) -> None:
        self.directory = storage.open(location)
        self.location = self.directory.location.rstrip("/") or "/"
        self._storage = storage
        self._layout = layout
        # Plain DCP commits with its metadata, or with those of its ranks.
        self._commits = (*layout.records, names.METADATA, names.rank_metadata_name(0))
        self._known: dict[int, Summary] = {}

    def path(self, step: int) -> str:
        """The directory of a step."""
        return f"{self.location.rstrip('/')}/{step_name(step)}"

    def open(self, step: int) -> Directory:
        """The directory of a step, to look into."""
        return self._storage.open(self.path(step))

    def is_committed(self, step: int) -> bool:
        """Whether a save into it was ever committed, ours or plain DCP's."""
        directory = self.open(step)
        return any(directory.exists(record) for record in self._commits)

    def committed(self) -> list[int]:
        """The committed steps, in order, also those whose commit record is damaged."""
        return [step for step in self._steps() if self.is_committed(step)]

    def readable(self) -> list[int]:
        """The committed steps whose commit record can be read, in order; all of them are read."""
        return [step for step in self.committed() if self._has_record(step)]

    def latest(self) -> int | None:
        """The newest step whose files all have their sizes, ``None`` if there is none.

        Raises:
            CheckpointError: whether a step is whole cannot be told, such as one of a newer format.
        """
        for step in reversed(self.committed()):
            try:
                if self.damage(step) is None:
                    return step
            except (CheckpointError, OSError):
                if self.is_committed(step):
                    raise
        return None

    def uncommitted(self) -> dict[int, bool]:
        """Steps that were begun and never committed, and whether a save is under way there."""
        found = {}
        for step in self._steps():
            if not self.is_committed(step) and any(map(names.is_data, self.open(step).names())):
                found[step] = self._is_being_saved(step)
        return found

    def summary(self, step: int, is_fresh: bool = False) -> Summary:
        """What the commit record of a step says.

        Args:
            is_fresh: read it, even if it was read before.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if is_fresh or step not in self._known:
            self._known.pop(step, None)
            directory = self.open(step)
            try:
                self._known[step] = Summary.of(self._layout.open(directory))
            except CheckpointError as error:
                if directory.location not in str(error):
                    error.args = (f"{directory.location}: {error}", *error.args[1:])
                raise
        return self._known[step]

    def forget(self, step: int) -> None:
        """A step was replaced, or is gone."""
        self._known.pop(step, None)

    def check_sizes(self, step: int, is_fresh: bool = False) -> Summary:
        """Raise unless every file of a step is there with the size that was written.

        Raises:
            CorruptCheckpointError: naming a file that is missing, cut off or longer.
            CheckpointError: as :meth:`summary`.
        """
        summary, directory = self.summary(step, is_fresh), self.open(step)
        for name, size in summary.files.items():
            try:
                found = directory.size(name)
            except MissingFileError as error:
                message = f"{directory.location}: {name} is missing"
                raise MissingFileError(message, error.filename) from None
            if size not in (-1, found):
                raise CorruptCheckpointError(
                    f"{directory.location}: {name} has {found} bytes, {size} were written"
                )
        return summary

    def damage(self, step: int) -> CheckpointError | OSError | None:
        """What is wrong with the commit record or the sizes of the files of a step, as it is now.

        Raises:
            CheckpointError: that cannot be told, such as of one of a newer format.
        """
        wrong: CheckpointError | OSError | None = None
        for _ in range(2):  # one that is replaced meanwhile loses the files of before
            try:
                self.check_sizes(step, is_fresh=True)
            except (CheckpointError, OSError) as error:
                if not is_damage(error):
                    raise
                wrong = error
            else:
                return None
        return wrong

    def is_whole(self, step: int) -> bool:
        """Whether a step has all its files, with the sizes that were written."""
        try:
            self.check_sizes(step)
        except (CheckpointError, OSError):
            return False
        return True

    def records(
        self, keep_last: int, metric: str | None, damaged: Collection[int] = ()
    ) -> list[StepRecord]:
        """What the retention has to know, the newest step first.

        The sizes of files are looked at until ``keep_last`` whole steps are found; steps older than
        those were whole when they were the newest.

        Args:
            metric: by which steps are the best; ``None`` where that does not matter.
            damaged: steps known not to be whole.
        """
        found: list[StepRecord] = []
        missing = keep_last
        for step in reversed(self.committed()):
            is_foreign = not any(map(self.open(step).exists, self._layout.records))
            is_whole = step not in damaged and (is_foreign or missing <= 0 or self.is_whole(step))
            missing -= is_whole and not is_foreign
            found.append(
                StepRecord(
                    step,
                    self._score(step, metric),
                    is_whole,
                    is_pinned=self.is_pinned(step),
                    is_being_saved=self._is_being_saved(step),
                    is_foreign=is_foreign,
                )
            )
        return found

    def is_pinned(self, step: int) -> bool:
        """Whether somebody has said that a step stays."""
        return self.open(step).exists(PINNED)

    def set_pinned(self, step: int, is_pinned: bool) -> None:
        """Say that a step stays, or take that back.

        Raises:
            CheckpointNotFoundError: the step is not committed.
        """
        directory = self.open(step)
        if not self.is_committed(step):
            raise CheckpointNotFoundError(
                f"there is no checkpoint in {directory.location} to pin", directory.location
            )
        if not is_pinned:
            directory.delete([PINNED])
        elif not directory.exists(PINNED):
            directory.put_whole(PINNED, b"")
        directory.sync()

    def retire(self, step: int) -> Callable[[], None]:
        """Take a step out of sight; what is returned deletes it."""
        self.forget(step)
        return self._storage.retire(self.path(step))

    def _steps(self) -> list[int]:
        found = map(step_of, self._storage.folders(self.location))
        return sorted(step for step in found if step is not None)

    def _has_record(self, step: int) -> bool:
        try:
            self.summary(step, is_fresh=True)
        except (CheckpointError, OSError) as error:
            return self.is_committed(step) and not is_damage(error)
        return True

    def _is_being_saved(self, step: int) -> bool:
        directory = self.open(step)
        return bool(live_saves(directory, directory.names(), self._storage.stale_after))

    def _score(self, step: int, metric: str | None) -> float | None:
        if metric is None:
            return None
        try:
            return self.summary(step).score(metric)
        except (CheckpointError, OSError):
            return None
