"""The checkpoints of one training run."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, SupportsIndex

from dcp_pipeline.core.errors import CheckpointError, ConfigError
from dcp_pipeline.manager.claim import Claim
from dcp_pipeline.manager.events import Events, OnEvent
from dcp_pipeline.manager.intervals import Intervals
from dcp_pipeline.manager.preemption import StopRequests
from dcp_pipeline.manager.ranks import Ranks
from dcp_pipeline.manager.restoring import Restorer, tell_restored
from dcp_pipeline.manager.roots import Root
from dcp_pipeline.manager.saving import Metrics, Saving, StepSaver
from dcp_pipeline.manager.settings import settings_of
from dcp_pipeline.manager.stopping import Stopping
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.pipelines.in_flight import SaveFuture
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.types.dcp import AsyncSaveResponse

__all__ = ["CheckpointManager"]


class CheckpointManager:
    """Saves the steps of a run below a root directory, keeps some, and goes on from the newest.

    A step counts once its commit record is there; what a killed save has left does not. One rank
    looks and decides, the others follow: every method that is not said to be local is called on all
    ranks, in the same order.

    Args:
        root: path or URI of the run's directory; one job at a time saves into it.
        pipeline: what saves and loads; a default one if ``None``.
        process_group: the ranks of the run, ``None`` for all.
        on_event: called on every rank with each :class:`CheckpointEvent`; what it raises is logged.
        stop_when: asked by `should_stop`; the run is to end once it is true on any rank.
        settings: fields of the config group ``manager``, which they override: ``keep_last``,
            ``keep_every``, ``save_every_steps`` ….

    Raises:
        ConfigError: naming each setting that is wrong.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as root:
        ...     with CheckpointManager(root, keep_last=2, save_every_steps=10) as manager:
        ...         for step in range(1, 36):
        ...             if manager.should_save(step):
        ...                 _ = manager.save(step, {"weight": torch.full((2,), float(step))})
        ...         state = {"weight": torch.zeros(2)}
        ...         manager.steps(), manager.restore(state), state["weight"]
        ([20, 30], 30, tensor([30., 30.]))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        pipeline: Pipeline | None = None,
        *,
        process_group: Any = None,
        on_event: OnEvent | None = None,
        stop_when: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> None:
        self._owns_pipeline = pipeline is None
        self.pipeline = pipeline or Pipeline()
        config = self.pipeline.config
        self.settings = settings_of(config.manager, settings)
        layout = config.layout.build()
        if not layout.keeps_notes:
            raise ConfigError(
                f"layout {layout.kind!r} keeps no notes of steps, which a manager needs: save with"
                " the pipeline, or convert a step",
                "layout",
            )
        storage = config.storage.build()
        self._root = Root(os.fspath(root), storage, layout)
        self._ranks = Ranks(self.pipeline, process_group)
        self._events = Events(on_event)
        self._intervals = Intervals(
            self.settings.save_every_steps, self.settings.save_every_minutes
        )
        requests = StopRequests(self.settings.stop_signals, self.settings.grace_seconds, stop_when)
        self._stopping = Stopping(requests, self._ranks, self._events)
        claim = Claim(
            self._root.directory, self.settings.heartbeat_seconds, self.settings.takeover_seconds
        )
        self._saver = StepSaver(
            self._root, config.storage, self._ranks, self.settings, claim, self._events
        )
        self._has_background = False
        # Also where nobody closes it: signals and the root are given back when it goes.
        self._release = weakref.finalize(self, _release, claim, requests, storage)

    @property
    def root(self) -> str:
        """The directory of the run, as its storage names it."""
        return self._root.location

    @property
    def failures(self) -> int:
        """How many saves have failed."""
        return self._saver.failures

    def path(self, step: int) -> str:
        """The directory of a step; local."""
        return self._root.path(step)

    def save(
        self, step: SupportsIndex, state: Any, *, metrics: Metrics | None = None
    ) -> SavedMetadata:
        """Save ``state`` as a step, then remove steps that are not to be kept.

        Args:
            step: from 0 on.
            state: as in :meth:`Pipeline.save`.
            metrics: numbers by name, kept with the step; those of the coordinator count, with a
                warning where another rank has others. What is no finite number is never best.

        Raises:
            CheckpointExistsError: the step is committed and ``manager.overwrite`` is ``error``. One
                whose commit record or sizes are damaged is saved anew, with a warning; one with
                damaged bytes only after :meth:`restore` of this manager has found that.
            StateError: a metric is no number, such as ``None``.
            ConcurrentSaveError: another job saves into this root.
            CheckpointException: the save failed, on any rank; the steps before are untouched.
        """
        saving = self._begin(step, metrics)
        try:
            saved = self.pipeline.save(
                state,
                saving.path,
                process_group=self._ranks.group,
                notes=saving.notes,
                guard=saving.guard,
            )
        except BaseException as error:
            self._saver.fail(saving, error)
            raise
        self._saver.succeed(saving, saved)
        return saved

    def async_save(
        self, step: SupportsIndex, state: Any, *, metrics: Metrics | None = None
    ) -> Future[Any] | AsyncSaveResponse:
        """As :meth:`save`, but return once the snapshot is taken.

        Steps that are not to be kept are removed once the new one is committed. Once the run is
        to stop, saves under way are waited for first, so that this one is not left out.

        Returns:
            What :meth:`Pipeline.async_save` does: a future, done with the :class:`SavedMetadata`
            when the step is committed, or with ``None`` where ``background.when_full`` left it out.

        Raises:
            CheckpointException: as :meth:`save`; also where an earlier one failed meanwhile.
        """
        if self._stopping.reason:
            self._saver.settle()
        saving = self._begin(step, metrics)
        self._has_background = True
        try:
            begun = self.pipeline.async_save(
                state,
                saving.path,
                process_group=self._ranks.group,
                notes=saving.notes,
                guard=saving.guard,
            )
        except BaseException as error:
            self._saver.fail(saving, error)
            raise
        future = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
        self._saver.follow(saving, future)
        future.add_done_callback(partial(_end_save, saving, self._saver, [self]))
        return begun

    def _begin(self, step: SupportsIndex, metrics: Metrics | None) -> Saving:
        if not self._release.alive:
            raise CheckpointError(f"the manager of {self.root} is closed")
        saving = self._saver.begin(step, metrics)
        self._intervals.begin()
        return saving

    def restore(self, state: Any, step: int | None = None) -> int | None:
        """Load a step into ``state``.

        Args:
            state: as in :meth:`Pipeline.load`.
            step: ``None`` for the newest that loads whole: one that is damaged or incomplete is
                named in a warning, what it has changed is put back, and the one before is tried
                (``manager.fallback``).

        Returns:
            The step, ``None`` where nothing was ever committed.

        Raises:
            CheckpointNotFoundError: the step asked for is not there.
            IncompleteCheckpointError: its save never finished.
            CorruptCheckpointError: it is damaged; or there are steps, and none of them is whole.
            LoadMismatchError: ``state`` does not fit; no other step is tried then.
        """
        self._saver.settle()
        self._ranks.decide("restore", step)
        restorer = Restorer(self._root, self.pipeline, self._ranks, self.settings.fallback)
        restored = restorer.newest(state) if step is None else restorer.step(state, step)
        self._saver.damaged.update(restored.skipped)
        tell_restored(self._events, restored, self._root, self._ranks.rank)
        return restored.step

    def steps(self) -> list[int]:
        """The committed steps, in order; the same on every rank.

        A step whose commit record cannot be read is none. The record alone is looked at: a step
        whose data are damaged is listed, and is gone past by :meth:`latest` and :meth:`restore`.
        """
        steps: list[int] = self._ranks.decide("list", None, lambda _: self._root.readable())
        return steps

    def latest(self) -> int | None:
        """The newest step whose files all have their sizes, ``None`` if there is none.

        It is the one that :meth:`restore` tries first, which then compares checksums. ``None``
        also where there are steps and all are damaged, which :meth:`restore` raises for.

        Raises:
            CheckpointException: whether a step is whole cannot be told, such as one that a newer
                version has written; :meth:`restore` raises for it too.
        """
        step: int | None = self._ranks.decide("latest", None, lambda _: self._root.latest())
        return step

    def pin(self, step: int) -> None:
        """Keep a step, whatever the retention says, until :meth:`unpin`.

        Raises:
            CheckpointNotFoundError: it is not committed.
        """
        self._ranks.decide("pin", None, lambda _: self._root.set_pinned(step, True))

    def unpin(self, step: int) -> None:
        """Take back :meth:`pin`; the next save may remove the step.

        Raises:
            CheckpointNotFoundError: it is not committed.
        """
        self._ranks.decide("unpin", None, lambda _: self._root.set_pinned(step, False))

    def should_save(self, step: int) -> bool:
        """Whether the step is one to save: by an interval, or since the run is to stop.

        False for the step that was saved last, also where that fails in the background. The ranks
        exchange a message only where ``save_every_minutes`` is set; the coordinator's clock
        decides.
        """
        if step == self._saver.last:
            return False
        if self._stopping.reason or self._intervals.is_due_by_step(step):
            return True
        if not self._intervals.has_minutes:
            return False
        is_due: bool = self._ranks.decide(
            "should_save", None, lambda _: self._intervals.is_due_by_time()
        )
        return is_due

    def should_stop(self) -> bool:
        """Whether the run is to end: a stop signal came, or ``stop_when`` is true, on any rank.

        All ranks get the same answer at the same call. Once it is true it stays so. From the first
        call on until `close` the signals of ``manager.stop_signals`` no longer end the process;
        outside the main thread they cannot be caught. Each call until then exchanges one small
        message between the ranks.
        """
        return self._stopping.agreed()

    def wait(self) -> None:
        """Until every save that was begun is committed or has failed, and removals are done; local.

        Raises:
            CheckpointException: a save in the background failed, and nobody has seen that yet.
        """
        try:
            if self._has_background:
                self.pipeline.wait()
        finally:
            self._saver.settle()

    def close(self) -> None:
        """Wait as :meth:`wait` does, then give back the root, the signals and an own pipeline.

        Local, and never the last to hear of an error: what a save in the background has failed
        with is raised here at the latest.

        Raises:
            CheckpointException: as :meth:`wait`.
            CoordinationError: saves did not end within ``background.close_timeout_seconds``; what
                is still under way will not be committed.
        """
        deadline = time.monotonic() + self._close_timeout
        try:
            if self._owns_pipeline:
                self.pipeline.close()
            elif self._has_background:
                self.pipeline.wait(self._close_timeout)
        finally:
            self._saver.settle(max(0.0, deadline - time.monotonic()))
            self._release()

    @property
    def _close_timeout(self) -> float:
        background: Any = self.pipeline.config.background
        return float(background.close_timeout_seconds)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        # The error is what matters: the other ranks may be anywhere, and nothing is asked of them.
        try:
            self._saver.settle(self._close_timeout)
        finally:
            self._release()
            if self._owns_pipeline:
                self.pipeline.__exit__(kind, error, trace)


def _end_save(
    saving: Saving, saver: StepSaver, kept_alive: list[CheckpointManager], future: Future[Any]
) -> None:
    """In the background. A manager that nobody holds any more keeps its root until then."""
    # Where it is done by now this is the caller's thread, whose look would count as having seen it.
    error = future.error() if isinstance(future, SaveFuture) else future.exception()
    try:
        if error is not None:
            saver.fail(saving, error)
        else:
            saver.succeed(saving, future.result())
    finally:
        kept_alive.clear()


def _release(claim: Claim, requests: StopRequests, storage: Any) -> None:
    requests.restore()
    claim.release()
    storage.close()
