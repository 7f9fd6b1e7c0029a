"""A config and its two graphs."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from dcp_pipeline.config.compose import compose, load_mapping
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import ConfigError, RollbackFailedError, StateError
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.load import load_graph
from dcp_pipeline.pipelines.load_job import LoadJob, Rollback
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.report import LoadReport
from dcp_pipeline.pipelines.save import save_graph
from dcp_pipeline.pipelines.saved import SavedMetadata
from dcp_pipeline.pipelines.steps.load_again import Replaced
from dcp_pipeline.pipelines.together import run_together

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
        coordinator = self.coordinator(process_group, no_dist, coordinator_rank)
        directory = self._parts.storage.open(_as_text(checkpoint_id))
        job = SaveJob(self._parts, coordinator, directory, _checked_notes(notes))
        job.guard = guard or job.guard
        trace = Trace("save", coordinator.rank)
        try:
            values = run_together(self.save_graph, {"state": state, "job": job}, coordinator, trace)
            job.finish()
        except BaseException:
            job.abandon()
            raise
        if coordinator.is_coordinator:
            logger.info("saved %s in %.3f s: %s", directory.location, trace.seconds, trace)
        trace.slowest_writer = job.slowest_writer
        return SavedMetadata(values["manifest"], directory.location, trace)

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
        directory = self._parts.storage.open(_as_text(checkpoint_id))
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
        """Give back buffers and connections."""
        self._parts.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _undo(job: LoadJob, error: BaseException) -> None:
    """Put back what an interrupted load has changed; what cannot be is said beside the error."""
    try:
        job.rollback.run(job.template)
    except RollbackFailedError as failed:
        error.add_note(str(failed))


def _checked_notes(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        checked: dict[str, Any] = json.loads(json.dumps(dict(notes or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StateError(f"the notes of a checkpoint are plain JSON data: {error}") from error
    return checked


def _as_text(checkpoint_id: str | os.PathLike[str]) -> str:
    text = os.fspath(checkpoint_id)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"checkpoint_id has to be a path or a URI, found {checkpoint_id!r}")
    return text
