"""Asynchronous saves in a process beside every rank.

The processes have a process group of their own, over a store that the coordinator's process
serves. This side only agrees on whether all processes live, passes the snapshot on, and waits.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from dcp_pipeline.background.base import ProcessBackground
from dcp_pipeline.background.worker import Worker
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.coordination.errors import error_to_record
from dcp_pipeline.coordination.exchange import failure_of
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import BackgroundDiedError, ConfigError, CoordinationError
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.trace import NodeTiming, Trace
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.pipelines.serving import Done, Failed, Join, Save, Serve, Serving, describe
from dcp_pipeline.pipelines.steps.save_commit import remove_dead_files
from dcp_pipeline.staging.arena import ArenaSnapshot, ArenaStager
from dcp_pipeline.types.entries import Entries
from dcp_pipeline.types.exceptions import CheckpointException, Failures, joint_error

__all__ = ["RemoteSaves"]


logger = logging.getLogger("dcp_pipeline")


class RemoteSaves:
    """The background process of this rank, and what it has been given.

    Every method but :meth:`take_problem` and :meth:`stop` is called in the background, by all ranks
    in the same order.

    Args:
        background: how processes are started.
        config, nodes: what the process builds its pipeline of.
        stager: whose buffers it maps.
    """

    def __init__(
        self,
        background: ProcessBackground,
        config: PipelineConfig,
        nodes: Sequence[Node],
        stager: ArenaStager,
    ) -> None:
        self._background = background
        self._config = config
        self._nodes = tuple(nodes)
        self._stager = stager
        self._worker: Worker | None = None
        self._lane: object = None
        self._sent: set[int] = set()
        self._has_told = False
        self._is_closed = False

    def save(
        self, job: SaveJob, staged: Entries, trace: Trace, failure: Exception | None
    ) -> SavedMetadata:
        """What comes behind the snapshot, in the process.

        Raises:
            CheckpointException: as :meth:`Pipeline.save`; also where a process has died.
        """
        coordinator = job.coordinator
        self.prepare(coordinator)
        outcome: Done | Exception
        try:
            outcome = self._ask(job, staged, trace, failure)
        except Exception as error:
            outcome = error
        try:
            self._compare(coordinator, outcome)
        finally:
            if isinstance(outcome, BackgroundDiedError):
                remove_dead_files(job)
        if isinstance(outcome, CheckpointException):
            raise outcome
        if isinstance(outcome, Exception):
            own: Failures = {coordinator.rank: (outcome, traceback.StackSummary())}
            raise joint_error("background", own, coordinator.rank) from outcome
        trace.timings += [NodeTiming(*timing) for timing in outcome.timings]
        trace.slowest_writer = outcome.slowest_writer
        if coordinator.is_coordinator:
            logger.info("saved %s in %.3f s: %s", job.directory.location, trace.seconds, trace)
        return SavedMetadata(outcome.record, job.directory.location, trace)

    def prepare(self, coordinator: Coordinator) -> None:
        """Make sure that every rank has a process, and that they have found one another."""
        worker = self._worker
        is_up = worker is not None and worker.is_alive and self._lane is coordinator.lane
        if all(_share(coordinator, "workers", is_up)):
            return
        self.stop()
        self._start(coordinator)

    def _start(self, coordinator: Coordinator) -> None:
        is_alone = coordinator.world_size == 1
        place: Any = None
        try:
            worker = self._background.worker(Serving, self._config, self._nodes)
            # From now on it can be ended from outside.
            self._worker = worker
            if self._is_closed:
                worker.kill()
            worker.wait_until_up()
            place = socket.gethostname()
            if coordinator.is_coordinator and not is_alone:
                place = [place, worker.request(Serve(coordinator.world_size))]
        except Exception as error:
            coordinator.exchange("start", error)
            raise AssertionError("an error is shared") from error
        places = _share(coordinator, "start", place)
        if not is_alone:
            host, port = places[coordinator.coordinator_rank]
            hosts = {host, *(p for p in places if isinstance(p, str))}
            address = "localhost" if len(hosts) == 1 else _address_of(host, coordinator)
            join = Join(
                address, port, coordinator.rank, coordinator.world_size,
                self._background.start_timeout_seconds,
            )  # fmt: skip
            failure: Exception | None = None
            try:
                worker.request(join)
            except Exception as error:
                failure = error
            try:
                coordinator.exchange("join", failure or b"")
            except BaseException:
                self.stop()
                raise
        self._lane = coordinator.lane
        self._has_told = False

    def _ask(self, job: SaveJob, staged: Entries, trace: Trace, failure: Exception | None) -> Done:
        worker, coordinator = self._worker, job.coordinator
        assert worker is not None
        save = Save(
            location=job.directory.location,
            is_alone=coordinator.world_size == 1,
            coordinator_rank=coordinator.coordinator_rank,
            notes=dict(job.notes),
            empty=job.empty,
            buffers=self._stager.numbers(),
        )
        descriptor = -1
        try:
            save.guard = _sendable(job.guard) if coordinator.is_coordinator else None
            if isinstance(staged, ArenaSnapshot):
                staged.wait()
                buffer = staged.arena.buffer
                save.entries = pickle.dumps(describe(staged))
                save.buffer, save.nbytes = buffer.number, buffer.data.numel()
                descriptor = -1 if buffer.number in self._sent else buffer.descriptor
        except Exception as error:
            # The process takes part all the same, so that the others hear of it.
            failure = failure or error
        save.failure = None if failure is None else error_to_record(failure)
        answer: Done | Failed = worker.request(save, descriptor)
        if isinstance(answer, Done):
            self._sent.add(save.buffer)
            return answer
        # It may have failed to map the buffer.
        self._sent.discard(save.buffer)
        own = failure if failure is not None and coordinator.rank in answer.records else None
        records = {str(rank): record for rank, record in answer.records.items()}
        raise failure_of("save", records, own, coordinator.rank)

    def _compare(self, coordinator: Coordinator, outcome: Done | Exception) -> None:
        """Say on all ranks whose process has died, if one has."""
        is_dead = isinstance(outcome, BackgroundDiedError)
        told = [str(outcome), getattr(outcome, "exit_code", None)] if is_dead else None
        is_lost = is_dead or isinstance(outcome, CoordinationError)
        answers = _share(coordinator, "background", [told, is_lost])
        if any(lost for _, lost in answers):
            # Their group is broken: all of them start again, together.
            self.stop()
        dead = {rank: died for rank, (died, _) in enumerate(answers) if died is not None}
        if dead:
            failures: Failures = {
                rank: (BackgroundDiedError(text, code), traceback.StackSummary())
                for rank, (text, code) in dead.items()
            }
            raise joint_error("background", failures, coordinator.rank)

    def take_problem(self) -> tuple[str, int | None] | None:
        """What is wrong with this rank's process, if nobody was told yet, and its exit code."""
        worker = self._worker
        if worker is None or worker.is_alive or self._has_told:
            return None
        self._has_told = True
        return f"the background process {worker.pid} died, {worker.ending}", worker.exit_code

    def close(self) -> None:
        """End the process for good, also one that is just being started."""
        self._is_closed = True
        self.stop()

    def stop(self) -> None:
        """End the process; the next save starts another."""
        worker, self._worker = self._worker, None
        self._lane, self._sent = None, set()
        if worker is not None:
            worker.close()


def _sendable(guard: Callable[[], None] | None) -> bytes | None:
    try:
        return None if guard is None else pickle.dumps(guard)
    except Exception as error:
        raise ConfigError(
            f"a background process cannot be sent this guard: {error}", "background"
        ) from error


def _share(coordinator: Coordinator, step: str, value: Any) -> list[Any]:
    """A value of every rank on every rank, as plain JSON data."""

    def gather(messages: list[bytes]) -> list[bytes]:
        everything = json.dumps([json.loads(message) for message in messages]).encode()
        return [everything] * len(messages)

    shared: list[Any] = json.loads(coordinator.exchange(step, json.dumps(value).encode(), gather))
    return shared


def _address_of(host: str, coordinator: Coordinator) -> str:
    # Where the launcher's rank 0 coordinates, the launcher's address of it is known to work.
    return os.environ.get("MASTER_ADDR", host) if coordinator.coordinator_rank == 0 else host
