"""What comes before and after a save of a step: the claim, the notes, the events, the retention."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, SupportsFloat, SupportsIndex

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointExistsError,
    DisagreementError,
    StateError,
    StorageError,
    UnsafeCheckpointError,
)
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.manager.claim import Claim, Fence
from dcp_pipeline.manager.config import ManagerConfig
from dcp_pipeline.manager.events import CheckpointEvent, Events
from dcp_pipeline.manager.ranks import Ranks
from dcp_pipeline.manager.removal import Remover
from dcp_pipeline.manager.roots import Root
from dcp_pipeline.manager.steps import step_name
from dcp_pipeline.pipelines.saved import SavedMetadata

__all__ = ["Metrics", "Saving", "StepSaver"]

Metrics = Mapping[str, SupportsFloat]

logger = logging.getLogger("dcp_pipeline")

_SHOWN = 8
"""Of how many ranks the values are named in a warning."""


@dataclass(frozen=True)
class Saving:
    """A save that may begin.

    Attributes:
        step: of the run.
        path: where it goes.
        notes: for the manifest.
        guard: for the commit; on the coordinator alone.
        started: by the monotonic clock, in seconds.
    """

    step: int
    path: str
    notes: dict[str, Any]
    guard: Callable[[], None] | None
    started: float


class StepSaver:
    """Begins and ends the saves of a manager; what is between is the pipeline's.

    Args:
        root: where the steps are.
        storage: config of their storage.
        ranks: who saves.
        settings: of the manager.
        claim: makes the root this run's.
        events: hears what happens.

    Attributes:
        last: the step whose save was begun last, unless that raised; alike on all ranks.
        failures: how many saves have failed.
        damaged: steps that did not load; a save may replace them.
    """

    def __init__(
        self,
        root: Root,
        storage: KindConfig,
        ranks: Ranks,
        settings: ManagerConfig,
        claim: Claim,
        events: Events,
    ) -> None:
        self.last: int | None = None
        self.failures = 0
        self.damaged: set[int] = set()
        self._root = root
        self._storage = storage
        self._ranks = ranks
        self._settings = settings
        self._claim = claim
        self._events = events
        self._remover = Remover(root, settings, self._note_removed)
        self._pending: dict[int, Future[Any] | None] = {}
        self._changed = threading.Condition()
        self._has_looked = False

    def begin(self, step: SupportsIndex, metrics: Metrics | None) -> Saving:
        """On all ranks together: whether the step may be saved.

        Raises:
            CheckpointExistsError: it is committed and not damaged, or being saved, and is not to
                be replaced.
            ConcurrentSaveError: the root is another run's.
            DisagreementError: ranks name different steps, or have different settings.
            StateError: a metric is no number.
        """
        started, number = time.monotonic(), -1
        mine: Any
        try:
            number = operator.index(step)
            step_name(number)
            mine = [number, _plain(metrics or {}), self._settings.model_dump_json()]
        except Exception as error:
            mine = error
        try:
            run = self._ranks.decide("begin save", mine, self._admit)
        except Exception as error:
            self._note_failure(number, started, error)
            raise
        with self._changed:
            self._pending[number] = None
        self.last = number
        fence = Fence(self._storage, self._root.location, self._claim.mark)
        notes = {"step": number, "metrics": mine[1], "run": run}
        guard = fence if self._ranks.is_coordinator else None
        return Saving(number, self._root.path(number), notes, guard, started)

    def _admit(self, messages: list[Any]) -> str:
        """On the coordinator: the id of the run."""
        steps = [message[0] for message in messages]
        if len(set(steps)) > 1:
            raise DisagreementError(f"the ranks do not save the same step: {steps}, by rank")
        settings = [message[2] for message in messages]
        if len(set(settings)) > 1:
            raise DisagreementError(
                "the ranks have different settings of the manager: " + "; ".join(set(settings))
            )
        step = int(steps[0])
        self._claim.hold()
        if self._is_pending(step):
            raise CheckpointExistsError(
                f"step {step} is being saved already", self._root.path(step)
            )
        may_replace = self._settings.overwrite == "replace" or step in self.damaged
        if not may_replace and self._root.is_committed(step):
            self._refuse_unless_damaged(step)
        _say_which_metrics_differ(step, [message[1] for message in messages], self._ranks.rank)
        if not self._has_looked:
            self._has_looked = True
            self._say_what_is_newer(step)
        return self._claim.run

    def _is_pending(self, step: int) -> bool:
        with self._changed:
            future = self._pending.get(step)
            if future is not None and future.done():
                # Its caller may be ahead of what comes behind the save, in the background.
                self._changed.wait_for(lambda: step not in self._pending)
            return step in self._pending

    def follow(self, saving: Saving, future: Future[Any]) -> None:
        """The save goes on in the background; :meth:`succeed` or :meth:`fail` come after it."""
        with self._changed:
            self._pending[saving.step] = future

    def _refuse_unless_damaged(self, step: int) -> None:
        """By its commit record and the sizes of its files; checksums are compared by a restore."""
        path, error = self._root.path(step), None
        with contextlib.suppress(CheckpointError, OSError):
            error = self._root.damage(step)
        # What may be whole for another reader, or at another time, is not to be lost.
        if error is None or isinstance(error, UnsafeCheckpointError | StorageError):
            raise CheckpointExistsError(
                f"{path} is committed already, and manager.overwrite is 'error':"
                " save another step, or set manager.overwrite=replace",
                path,
            )
        logger.warning("%s is damaged, and is saved anew: %s", path, error)

    def _say_what_is_newer(self, step: int) -> None:
        newer = [other for other in self._root.committed() if other > step]
        if newer:
            logger.warning(
                "step %d is saved although step %d is there, which a restore without a step"
                " prefers",
                step,
                newer[-1],
            )

    def succeed(self, saving: Saving, saved: SavedMetadata | None) -> None:
        """A save has ended well; ``None`` where it was left out."""
        with self._end(saving):
            if saved is None:
                self._events.emit(CheckpointEvent("skipped", saving.step, self._ranks.rank))
                return
            self.damaged.discard(saving.step)
            self._root.forget(saving.step)
            self._events.saved(
                saving.step,
                saved.trace,
                time.monotonic() - saving.started,
                path=saving.path,
                metrics=saving.notes["metrics"],
            )
            if self._ranks.is_coordinator:
                self._remover.tidy({saving.step, *self._pending}, self.damaged)

    def fail(self, saving: Saving, error: BaseException) -> None:
        """A save has failed; all that it may have left is an empty directory."""
        with self._end(saving):
            # One in the background fails at another moment on each rank.
            if self.last == saving.step and self._pending[saving.step] is None:
                self.last = None
            with contextlib.suppress(CheckpointError, OSError):
                self._root.open(saving.step).remove_if_empty()
            self._note_failure(saving.step, saving.started, error)

    def _note_failure(self, step: int, started: float, error: BaseException) -> None:
        self.failures += 1
        seconds = time.monotonic() - started
        detail = {"error": str(error) or type(error).__name__}
        rank = self._ranks.rank
        self._events.emit(CheckpointEvent("failed", step, rank, seconds=seconds, detail=detail))

    @contextlib.contextmanager
    def _end(self, saving: Saving) -> Any:
        try:
            yield
        finally:
            with self._changed:
                self._pending.pop(saving.step, None)
                self._changed.notify_all()

    def _note_removed(self, step: int) -> None:
        path = self._root.path(step)
        self._events.emit(CheckpointEvent("removed", step, self._ranks.rank, detail={"path": path}))

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until no save and no removal is under way; whether that came in time."""
        with self._changed:
            is_settled = self._changed.wait_for(lambda: not self._pending, seconds)
        if is_settled:
            self._remover.wait()
        return is_settled


def _say_which_metrics_differ(
    step: int, metrics: list[dict[str, float | str]], coordinator: int
) -> None:
    """One warning, where a rank names a metric or a value that the coordinator does not."""
    kept = metrics[coordinator]
    named = {name: None for of_rank in metrics for name in of_rank}
    lines = []
    for name in named:
        values = {rank: found[name] for rank, found in enumerate(metrics) if name in found}
        if any(value != kept.get(name) for value in values.values()):
            shown = [f"{value} on rank {rank}" for rank, value in values.items()]
            more = [f"{len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
            lines.append(f"{name!r} is " + ", ".join(shown[:_SHOWN] + more))
    if lines:
        logger.warning(
            "the ranks save step %d with different metrics, and those of rank %d are kept: %s",
            step,
            coordinator,
            "; ".join(lines),
        )


def _plain(metrics: Metrics) -> dict[str, float | str]:
    """Metrics as JSON has them: what is no finite number is kept as text, and is never best."""
    plain: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"metrics[{name!r}] is no number: {value!r}") from error
        plain[str(name)] = number if math.isfinite(number) else str(number)
    return plain
