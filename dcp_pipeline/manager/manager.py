"""The checkpoints of one training run."""

from __future__ import annotations

import json
import logging
import os
from types import TracebackType
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.layout.names import MANIFEST, METADATA, rank_metadata_name
from dcp_pipeline.manager.steps import kept_steps, step_name, step_of
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.filesystem import local_path

__all__ = ["CheckpointManager"]

logger = logging.getLogger("dcp_pipeline")


class CheckpointManager:
    """Saves steps below a root directory, finds the newest, and keeps only some.

    A step counts once its commit record is there; what a killed save has left does not. One rank
    looks and decides, the others follow.

    Args:
        root: path or ``file://`` URI of the run's directory.
        pipeline: what saves and loads; a default one if ``None``.
        keep_last: how many of the newest steps stay, ``None`` for all. At least 1.
        keep_every: steps divisible by this stay as well.
        process_group: the ranks of the run, ``None`` for all.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as root:
        ...     manager = CheckpointManager(root, keep_last=2)
        ...     for step in (10, 20, 30):
        ...         _ = manager.save(step, {"weight": torch.full((2,), float(step))})
        ...     state = {"weight": torch.zeros(2)}
        ...     manager.steps(), manager.restore(state), state["weight"]
        ([20, 30], 30, tensor([30., 30.]))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        pipeline: Pipeline | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        process_group: Any = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ConfigError(f"keep_last is at least 1, found {keep_last}", "keep_last")
        if keep_every is not None and keep_every < 1:
            raise ConfigError(f"keep_every is at least 1, found {keep_every}", "keep_every")
        self.root = local_path(root)
        self.pipeline = pipeline or Pipeline()
        self._owns_pipeline = pipeline is None
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._group = process_group
        self._changes = FileChanges()

    def path(self, step: int) -> str:
        """The directory of a step."""
        return os.path.join(self.root, step_name(step))

    def save(self, step: int, state: Any) -> SavedMetadata:
        """Save ``state`` as a step, then remove steps that are not to be kept.

        Raises:
            CheckpointExistsError: the step is committed and the pipeline does not overwrite.
        """
        saved = self.pipeline.save(state, self.path(step), process_group=self._group)
        if self._coordinator().is_coordinator:
            self._remove_old()
        return saved

    def restore(self, state: Any, step: int | None = None) -> int | None:
        """Load a step into ``state``.

        Args:
            step: ``None`` for the newest.

        Returns:
            The step, ``None`` if there is none at all.

        Raises:
            CheckpointNotFoundError: the step asked for is not there.
            IncompleteCheckpointError: its save never finished.
        """
        chosen = step if step is not None else self.latest()
        if chosen is None:
            return None
        self.pipeline.load(state, self.path(chosen), process_group=self._group)
        return chosen

    def steps(self) -> list[int]:
        """The committed steps, in order; the same on every rank."""

        def look(messages: list[bytes]) -> list[bytes]:
            return [json.dumps(self._committed()).encode()] * len(messages)

        found: list[int] = json.loads(self._coordinator().exchange("list steps", b"", look))
        return found

    def latest(self) -> int | None:
        """The newest committed step, ``None`` if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def _coordinator(self) -> Coordinator:
        return self.pipeline.coordinator(self._group)

    def _committed(self) -> list[int]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        steps = {name: step for name in names if (step := step_of(name)) is not None}
        return sorted(step for name, step in steps.items() if self._is_committed(name))

    def _is_committed(self, name: str) -> bool:
        # Ours, plain DCP's, and plain DCP's without collectives.
        records = (MANIFEST, METADATA, rank_metadata_name(0))
        return any(os.path.isfile(os.path.join(self.root, name, record)) for record in records)

    def _remove_old(self) -> None:
        committed = self._committed()
        kept = kept_steps(committed, self._keep_last, self._keep_every)
        for step in committed:
            if step not in kept:
                self._remove(self.path(step))

    def _remove(self, path: str) -> None:
        """Take a step out of sight in one atomic move, then delete it."""
        aside = os.path.join(self.root, f".removed-{os.path.basename(path)}-{os.urandom(4).hex()}")
        try:
            self._changes.replace(path, aside)
            self._changes.remove_tree(aside)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error)

    def close(self) -> None:
        """Give back the pipeline, if the manager made it."""
        if self._owns_pipeline:
            self.pipeline.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
