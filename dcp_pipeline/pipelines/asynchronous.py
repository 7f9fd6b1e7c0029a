"""Asynchronous saves: the caller waits for the snapshot, the rest runs in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcp_pipeline.background.base import Background, ProcessBackground
from dcp_pipeline.background.lane import Lane, close_at_exit, lane_of
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    ConcurrentSaveError,
    ConfigError,
    CoordinationError,
    StateError,
)
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.quiet import without_collections
from dcp_pipeline.graph.runner import run
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.complete import complete
from dcp_pipeline.pipelines.foreign import expanded
from dcp_pipeline.pipelines.in_flight import InFlight, SaveFuture
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.remote import RemoteSaves
from dcp_pipeline.pipelines.save import save_graph
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.staging.arena import ArenaStager
from dcp_pipeline.staging.base import Stager
from dcp_pipeline.staging.host import HostStager, PinnedStager, SharedStager
from dcp_pipeline.staging.inplace import InplaceStager
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.types.dcp import AsyncSaveResponse, AsyncStager
from dcp_pipeline.types.entries import Entries

__all__ = ["AsyncCall", "AsyncSaves"]

logger = logging.getLogger("dcp_pipeline")

_NOT_AGAIN = (CoordinationError, StateError, CheckpointExistsError, ConcurrentSaveError)
"""What another try would not change."""


@dataclass(frozen=True)
class AsyncCall:
    """One asynchronous save, as it was asked for.

    Attributes:
        directory: where the checkpoint goes.
        coordinator: makes the coordinator of the ranks, for the background or the foreground.
        notes, guard: as in :class:`SaveJob`.
    """

    directory: Directory
    coordinator: Callable[[bool], Coordinator]
    notes: Mapping[str, Any] = field(default_factory=dict)
    guard: Callable[[], None] | None = None

    def job(self, parts: Parts, coordinator: Coordinator) -> SaveJob:
        """The save on this rank."""
        return SaveJob(parts, coordinator, self.directory, self.notes, self.guard)


class AsyncSaves:
    """The asynchronous saves of a pipeline.

    Args:
        parts: what the pipeline's config has built.
        nodes: further nodes of the save graph.
        background: where the saves run.
    """

    def __init__(self, parts: Parts, nodes: Sequence[Node], background: Background) -> None:
        self._settings = background.settings
        self._lane = Lane()
        self.in_flight = InFlight(background.settings)
        self.is_process = background.is_process
        stager = _stager(parts.stager, background)
        self._parts = replace(parts, stager=stager)
        graph = save_graph(self._parts, nodes)
        # Nothing in the background may look at what training changes, and a process gets the
        # snapshot alone.
        passes = {"staged", "job"}.__contains__ if background.is_process else _is_snapshot
        self._front, self._back = graph.split("stage", passes)
        graph = save_graph(replace(parts, stager=InplaceStager()), nodes)
        self._inplace, _ = graph.split("stage", passes)
        self._is_staged_later = False
        self._remote: RemoteSaves | None = None
        if isinstance(background, ProcessBackground):
            assert isinstance(stager, ArenaStager)
            self._remote = RemoteSaves(background, parts.config, nodes, stager)
        close_at_exit(self)

    def save(
        self, state: Any, call: AsyncCall, stager: AsyncStager | None = None
    ) -> Future[Any] | AsyncSaveResponse:
        """Take the snapshot and save it in the background; see :meth:`Pipeline.async_save`."""
        if not self.make_room(call):
            return self.left_out()
        coordinator = call.coordinator(True)
        if stager is not None:
            return self.save_staged(
                state,
                coordinator,
                stager,
                lambda staged, failure: self._finish_staged(call, coordinator, staged, failure),
            )
        job = call.job(self._parts, coordinator)
        trace = Trace("save", coordinator.rank)
        inputs = {"state": state, "job": job}
        failure: Exception | None = None
        try:
            with without_collections():
                values = run(self._front, inputs, trace)
        except Exception as error:
            if coordinator.world_size == 1:
                raise
            # The others are on their way into the background, and hear of it there.
            values, failure = {"job": job}, error
        except BaseException as error:
            coordinator.report_failure(error)
            raise
        values = {name: value for name, value in values.items() if _is_snapshot(name)}
        staged: Entries = values.get("staged", Entries())
        try:
            future = self._start(
                coordinator, lambda: self._finish(call, job, values, staged, trace, failure)
            )
        except BaseException as error:
            coordinator.report_failure(error)
            self._parts.stager.release(staged)
            raise
        self._is_staged_later = self._parts.stager.is_asynchronous
        if self._is_staged_later:
            return AsyncSaveResponse(_once_copied(staged), future)
        return future

    def make_room(self, call: AsyncCall) -> bool:
        """Before a further save; whether it may be made. See :meth:`InFlight.make_room`."""
        return self.in_flight.make_room(lambda: call.coordinator(False))

    def left_out(self) -> Future[Any] | AsyncSaveResponse:
        """What a save returns that was not made: of the same type as the one under way."""
        future: Future[Any] = Future()
        future.set_result(None)
        return (
            AsyncSaveResponse(_without_result(future), future) if self._is_staged_later else future
        )

    def _start(self, coordinator: Coordinator, save: Callable[[], Any]) -> SaveFuture:
        future, settings = SaveFuture(coordinator.world_size == 1), self._settings
        lane = self._lane if coordinator.lane is None else lane_of(coordinator.lane)
        note = self.in_flight.note
        lane.start(lambda: future.run(save, note), settings.nice, settings.io_priority)
        self.in_flight.add(future)
        return future

    def _finish(
        self,
        call: AsyncCall,
        job: SaveJob,
        values: dict[str, Any],
        staged: Entries,
        trace: Trace,
        failure: Exception | None,
    ) -> SavedMetadata:
        """In the background: all that comes behind the snapshot, once or several times."""
        try:
            for attempt in range(self._settings.retries + 1):
                try:
                    if self._remote is not None:
                        return self._remote.save(job, staged, trace, failure)
                    inputs = values | {"job": job}
                    return complete(self._back, inputs, job, trace, failure, in_background=True)
                except Exception as error:
                    is_last = attempt == self._settings.retries
                    if is_last or failure is not None or isinstance(error, _NOT_AGAIN):
                        raise
                    logger.warning("a save in the background is tried again: %s", error)
                    job = job.again(call.coordinator(True))
                    trace = Trace("save", job.coordinator.rank, trace.timings[:2])
            raise AssertionError("unreachable")
        finally:
            self._parts.stager.release(staged)

    def save_staged(
        self,
        state: Any,
        coordinator: Coordinator,
        stager: AsyncStager,
        finish: Callable[[Any, Exception | None], Any],
    ) -> Future[Any] | AsyncSaveResponse:
        """With a stager in DCP's terms, which hands over a whole state.

        Args:
            finish: saves in the background: gets what was staged, or what went wrong.
        """
        failure: Exception | None = None
        staged: Any = None
        try:
            staged = stager.stage(expanded(state))
            if not isinstance(staged, Future) and stager.should_synchronize_after_execute:
                stager.synchronize_staging()
        except Exception as error:
            if coordinator.world_size == 1:
                raise
            failure = error
        except BaseException as error:
            coordinator.report_failure(error)
            raise

        # Popped, since the error of a save keeps its functions, and these what they have seen.
        held = [staged]

        def save() -> Any:
            state, problem = held.pop(), failure
            if isinstance(state, Future):
                try:
                    state = state.result()
                except Exception as error:
                    problem = error
            return finish(state, problem)

        future = self._start(coordinator, save)
        self._is_staged_later = isinstance(staged, Future)
        if isinstance(staged, Future):
            return AsyncSaveResponse(_without_result(staged), future)
        return future

    def _finish_staged(
        self, call: AsyncCall, coordinator: Coordinator, state: Any, failure: Exception | None
    ) -> SavedMetadata:
        job = call.job(self._parts, coordinator)
        trace = Trace("save", coordinator.rank)
        values: dict[str, Any] = {"job": job}
        # A process needs the copies in shared memory; a thread takes them where they are.
        front = self._front if self._remote is not None else self._inplace
        if failure is None:
            try:
                values = run(front, {"state": state, "job": job}, trace)
            except Exception as error:
                failure = error
        values = {name: value for name, value in values.items() if _is_snapshot(name)}
        staged: Entries = values.get("staged", Entries())
        return self._finish(call, job, values, staged, trace, failure)

    def check(self, coordinator: Coordinator) -> None:
        """See :meth:`Pipeline.check`."""
        problem: tuple[str, int | None] | None = None
        if self._remote is not None and self.in_flight.is_idle:
            # A save under way says itself what has become of the process.
            problem = self._remote.take_problem()
        self.in_flight.check(coordinator, problem)

    def warm_up(self, state: Any, call: AsyncCall) -> None:
        """See :meth:`Pipeline.warm_up`."""
        coordinator = call.coordinator(True)
        remote, done = self._remote, SaveFuture()
        if remote is not None:
            lane = self._lane if coordinator.lane is None else lane_of(coordinator.lane)
            lane.start(lambda: done.run(lambda: remote.prepare(coordinator), lambda error: None))
        stager = self._parts.stager
        if state is not None and isinstance(stager, ArenaStager):
            job = call.job(self._parts, coordinator)
            collect = self._front["collect"].function
            entries: Entries = collect(state=state, job=job)
            stager.reserve_for(entries, self._settings.max_in_flight)
        if remote is not None:
            done.result()

    def close(self, raises: bool = True) -> None:
        """Wait for what is under way, and give back buffers and the process.

        Raises:
            CheckpointException: a save had failed, and nobody has seen it yet.
            CoordinationError: the saves did not end in time.
        """
        timeout = self._settings.close_timeout_seconds
        try:
            if raises:
                self.in_flight.wait(timeout)
            else:
                self.in_flight.let_go(timeout)
        finally:
            if self._remote is not None:
                self._remote.close()
            self._parts.stager.close()


def _is_snapshot(name: str) -> bool:
    """Whether a value of the save graph is not over memory that training changes."""
    return name != "state" and not name.startswith("entries")


def _stager(configured: Stager, background: Background) -> Stager:
    if background.is_process:
        if isinstance(configured, SharedStager):
            return configured
        if isinstance(configured, InplaceStager):
            return SharedStager()
        raise ConfigError(
            "a background process takes its snapshot from shared memory: use stager=shared, or"
            " leave it at inplace",
            "stager",
        )
    if configured.is_snapshot:
        return configured
    return PinnedStager() if torch.accelerator.is_available() else HostStager()


def _once_copied(staged: Entries) -> Future[None]:
    """Done when all copies of a snapshot are."""
    done: Future[None] = Future()

    def wait() -> None:
        try:
            staged.wait()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=wait, name="dcp_pipeline staging", daemon=True).start()
    return done


def _without_result(staging: Future[Any]) -> Future[None]:
    done: Future[None] = Future()

    def pass_on(finished: Future[Any]) -> None:
        error = finished.exception()
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(None)

    staging.add_done_callback(pass_on)
    return done
