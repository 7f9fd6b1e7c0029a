"""A config and its two graphs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from dcp_pipeline.config.compose import compose, load_mapping
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import CheckpointError, RollbackFailedError
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.arguments import as_text, checked_notes
from dcp_pipeline.pipelines.asynchronous import AsyncCall, AsyncSaves
from dcp_pipeline.pipelines.complete import complete
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.load import load_graph
from dcp_pipeline.pipelines.load_job import LoadJob, Rollback
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.report import LoadReport
from dcp_pipeline.pipelines.save import save_graph
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.pipelines.steps.load_again import Replaced
from dcp_pipeline.pipelines.together import run_together
from dcp_pipeline.types.dcp import AsyncCheckpointerType, AsyncSaveResponse, AsyncStager

__all__ = ["Pipeline"]

logger = logging.getLogger("dcp_pipeline")

_ATTEMPTS = 100
"""Of a load whose checkpoint is replaced again and again, once per attempt at least."""


class Pipeline:
    """Saves and loads by a config; keeps its buffers and groups from one save to the next.

    Args:
        config: what to build.
        save_nodes, load_nodes: further nodes for the two graphs.

    Example:
        >>> import tempfile, torch
        >>> state = {"weight": torch.arange(4.0)}
        >>> with Pipeline(PipelineConfig()) as pipeline, tempfile.TemporaryDirectory() as path:
        ...     _ = pipeline.save(state, path)
        ...     state["weight"].zero_()
        ...     report = pipeline.load(state, path)
        tensor([0., 0., 0., 0.])
        >>> state["weight"], report.loaded
        (tensor([0., 1., 2., 3.]), ['weight'])
    """

    def __init__(
        self,
        config: PipelineConfig | None = None,
        *,
        save_nodes: Sequence[Node] = (),
        load_nodes: Sequence[Node] = (),
    ) -> None:
        self.config = config or PipelineConfig()
        self._parts = Parts.build(self.config)
        self._save_nodes = tuple(save_nodes)
        self._async_saves: dict[str, AsyncSaves] = {}
        self._is_closed = False
        self.save_graph: Graph = save_graph(self._parts, save_nodes)
        self.load_graph: Graph = load_graph(self._parts, load_nodes)

    @classmethod
    def from_config(
        cls, config: PipelineConfig | Mapping[str, Any] | str | os.PathLike[str]
    ) -> Pipeline:
        """A pipeline of a config, a mapping, or a YAML file.

        Raises:
            ConfigError: naming each key that is wrong.
        """
        return cls(load_mapping(config))

    @classmethod
    def from_recipe(cls, recipe: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Pipeline:
        """A pipeline of a recipe, by name or path, with Hydra overrides.

        >>> pipeline = Pipeline.from_recipe("tiny_decoder", ["storage.thread_count=4"])
        >>> pipeline.config.storage.thread_count
        4
        """
        return cls(compose(overrides, recipe=recipe).config)

    @staticmethod
    def builder() -> Any:
        """A :class:`PipelineBuilder`."""
        from dcp_pipeline.builder import PipelineBuilder

        return PipelineBuilder()

    def save(
        self,
        state: Any,
        checkpoint_id: str | os.PathLike[str],
        *,
        process_group: Any = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
        notes: Mapping[str, Any] | None = None,
        guard: Callable[[], None] | None = None,
    ) -> SavedMetadata:
        """Save ``state`` on all ranks together and commit it once.

        Args:
            state: nested dicts, lists and tuples of tensors, DTensors, plain values and
                ``Stateful`` objects. Every rank passes its own part.
            checkpoint_id: path or URI, the same on every rank.
            process_group: the ranks that save, ``None`` for all.
            no_dist: save this process alone.
            coordinator_rank: rank in the group that decides.
            notes: kept in the manifest, as plain JSON data.
            guard: called on the coordinator before anything is written and again right before
                the commit; what it raises fails the save on all ranks.

        Returns:
            DCP's metadata of what was saved, made when it is first looked at, with ``trace``.

        Raises:
            CheckpointException: on every rank, if any failed. Nothing was committed then.
        """
        self.wait()
        coordinator = self.coordinator(process_group, no_dist, coordinator_rank)
        directory = self._parts.storage.open(as_text(checkpoint_id))
        job = SaveJob(self._parts, coordinator, directory, checked_notes(notes), guard)
        trace = Trace("save", coordinator.rank)
        return complete(self.save_graph, {"state": state, "job": job}, job, trace)

    def async_save(
        self,
        state: Any,
        checkpoint_id: str | os.PathLike[str],
        *,
        process_group: Any = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
        notes: Mapping[str, Any] | None = None,
        guard: Callable[[], None] | None = None,
        async_checkpointer_type: AsyncCheckpointerType | None = None,
        async_stager: AsyncStager | None = None,
    ) -> Future[Any] | AsyncSaveResponse:
        """Take a snapshot of ``state`` on all ranks, and save it while training goes on.

        The snapshot is the moment of the call: nothing that is changed afterwards, tensor or
        Python value, shows up in the checkpoint. Saves end in the order of the calls.

        What fails in the background fails on all ranks; it is logged at once, and raised by the
        future, or else by the next save, :meth:`check`, :meth:`wait` or :meth:`close`.

        Args:
            guard: as in :meth:`save`; for a background process it has to be picklable.
            async_checkpointer_type: a thread or a process, ``None`` for the config's background.
            async_stager: one written for DCP, instead of the config's stager; yours to close.

        Returns:
            A future of what :meth:`save` returns, of ``None`` where the save was left out
            (``background.when_full``). Where staging goes on after the call (an ``async_stager``
            that does, or ``stager=pinned`` with ``overlap``) an ``AsyncSaveResponse``: wait for its
            ``staging_completion`` before changing the state.

        Raises:
            CheckpointException: an earlier save failed in the background, and nobody has seen it.
            CheckpointError: the state cannot be stored, where there is one rank; several hear of
                it together, from the future.

        Example:
            >>> import tempfile, torch
            >>> state = {"weight": torch.ones(4)}
            >>> with Pipeline() as pipeline, tempfile.TemporaryDirectory() as path:
            ...     saving = pipeline.async_save(state, path)
            ...     _ = state["weight"].zero_()
            ...     _ = saving.result()
            ...     _ = pipeline.load(state, path)
            >>> state["weight"]
            tensor([1., 1., 1., 1.])
        """
        call = self._async_call(
            process_group, no_dist, coordinator_rank, checkpoint_id, notes, guard
        )
        return self._asynchronous(async_checkpointer_type).save(state, call, async_stager)

    def async_save_staged(
        self,
        state: Any,
        stager: AsyncStager,
        finish: Callable[[Any, Exception | None, Coordinator], Any],
        async_checkpointer_type: AsyncCheckpointerType | None = None,
        process_group: Any = None,
        no_dist: bool = False,
    ) -> Future[Any] | AsyncSaveResponse:
        """Let ``finish`` save in the background what a stager of DCP's has taken.

        Everything else is as in :meth:`async_save`.

        Args:
            finish: gets what was staged, or what went wrong with it, and the ranks.
        """
        call = self._async_call(process_group, no_dist, 0, "staged", None, None)
        saves = self._asynchronous(async_checkpointer_type)
        if not saves.make_room(call):
            return saves.left_out()
        coordinator = call.coordinator(True)
        return saves.save_staged(
            state, coordinator, stager, lambda staged, failure: finish(staged, failure, coordinator)
        )

    def warm_up(
        self,
        state: Any = None,
        *,
        process_group: Any = None,
        no_dist: bool = False,
        async_checkpointer_type: AsyncCheckpointerType | None = None,
    ) -> None:
        """Do ahead what the first asynchronous save would wait for; on all ranks together.

        Starts the background process, and makes buffers for snapshots of ``state``, if given.

        Raises:
            CheckpointException: a process could not be started.
        """
        call = self._async_call(process_group, no_dist, 0, "warm-up", None, None)
        self._asynchronous(async_checkpointer_type).warm_up(state, call)

    def check(self, process_group: Any = None, no_dist: bool = False) -> None:
        """Raise what has failed in the background so far, on all ranks together; does not wait.

        Raises:
            CheckpointException: a save failed, or a background process died, on any rank.
        """
        for saves in self._async_saves.values():
            saves.check(self.coordinator(process_group, no_dist))

    def wait(self, timeout: float | None = None) -> None:
        """Until no save is under way in the background.

        Args:
            timeout: seconds, ``None`` for none.

        Raises:
            CheckpointException: a save failed, and nobody has seen it.
            CoordinationError: they did not end in time.
        """
        for saves in self._async_saves.values():
            saves.in_flight.wait(timeout)

    @property
    def failures(self) -> int:
        """How many saves have failed in the background, seen or not."""
        return sum(saves.in_flight.failures for saves in self._async_saves.values())

    def _asynchronous(self, wanted: AsyncCheckpointerType | None) -> AsyncSaves:
        if self._is_closed:
            raise CheckpointError("this pipeline is closed: nobody would close what it starts now")
        config = self.config.background
        is_process = wanted is AsyncCheckpointerType.PROCESS
        if wanted is not None and is_process != (config.kind == "process"):
            common = config.model_dump(exclude={"kind", "start_timeout_seconds"})
            chosen = {"kind": "process" if is_process else "thread", **common}
            config = load_mapping({**self.config.to_dict(), "background": chosen}).background
        if config.kind not in self._async_saves:
            self._async_saves[config.kind] = AsyncSaves(
                self._parts, self._save_nodes, config.build()
            )
        return self._async_saves[config.kind]

    def _async_call(
        self,
        process_group: Any,
        no_dist: bool,
        coordinator_rank: int,
        checkpoint_id: str | os.PathLike[str],
        notes: Mapping[str, Any] | None,
        guard: Callable[[], None] | None,
    ) -> AsyncCall:
        def coordinator(in_background: bool) -> Coordinator:
            return self._parts.coordination.coordinator(
                process_group, no_dist, coordinator_rank, in_background
            )

        directory = self._parts.storage.open(as_text(checkpoint_id))
        return AsyncCall(directory, coordinator, checked_notes(notes), guard)

    def load(
        self,
        state: Any,
        checkpoint_id: str | os.PathLike[str],
        *,
        process_group: Any = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
    ) -> LoadReport:
        """Load a checkpoint into ``state`` on all ranks together, in place.

        Args:
            state: the template, as in :meth:`save`; it says which keys, shapes and placements are
                wanted. Empty containers and ``None`` take whatever the checkpoint has for them.

        Returns:
            What was loaded, what was left alone, and what each node took.

        Raises:
            CheckpointException: on every rank, if any failed. All that had changed was put back.
        """
        coordinator = self.coordinator(process_group, no_dist, coordinator_rank)
        directory = self._parts.open_to_read(as_text(checkpoint_id))
        for attempt in range(_ATTEMPTS):
            job = LoadJob(self._parts, coordinator, directory, Rollback(self.config.rollback))
            trace = Trace("load", coordinator.rank)
            try:
                inputs = {"state": state, "job": job}
                values = run_together(self.load_graph, inputs, coordinator, trace)
                break
            except Replaced as replaced:
                if attempt == _ATTEMPTS - 1:
                    assert replaced.__cause__ is not None
                    raise replaced.__cause__ from None
                logger.info("%s was replaced while it was read: again", directory.location)
                coordinator = self.coordinator(process_group, no_dist, coordinator_rank)
            except BaseException as error:
                if not isinstance(error, Exception):
                    _undo(job, error)
                raise
        if coordinator.is_coordinator:
            logger.info("loaded %s in %.3f s: %s", directory.location, trace.seconds, trace)
        found, manifest = values["differences"], values["manifest"]
        return LoadReport(
            checkpoint_id=directory.location,
            save_id=manifest.save_id,
            loaded=values["fetched"].loaded,
            missing=found.missing,
            unexpected=found.unexpected,
            shapes=found.shapes,
            dtypes=found.dtypes,
            not_requested=found.not_requested,
            resized=found.resized,
            casts=job.casts,
            is_verified=job.is_verified,
            bytes_read=job.bytes_read,
            trace=trace,
        )

    def coordinator(
        self, process_group: Any = None, no_dist: bool = False, coordinator_rank: int = 0
    ) -> Coordinator:
        """The ranks of ``process_group``, as this pipeline's saves and loads see them."""
        return self._parts.coordination.coordinator(process_group, no_dist, coordinator_rank)

    def close(self) -> None:
        """Wait for what is under way in the background, and give back buffers and processes.

        Raises:
            CheckpointException: a save failed in the background, and nobody has seen it.
            CoordinationError: saves did not end within ``background.close_timeout_seconds``.
        """
        self._close(raises=True)

    def _close(self, raises: bool) -> None:
        self._is_closed = True
        with ExitStack() as stack:
            stack.callback(self._parts.close)
            while self._async_saves:
                _, saves = self._async_saves.popitem()
                stack.callback(saves.close, raises)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What unwinds the stack stays what is raised.
        self._close(raises=error is None)


def _undo(job: LoadJob, error: BaseException) -> None:
    """Put back what an interrupted load has changed; what cannot be is said beside the error."""
    try:
        job.rollback.run(job.template)
    except RollbackFailedError as failed:
        error.add_note(str(failed))
