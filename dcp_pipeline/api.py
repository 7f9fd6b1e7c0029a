"""Functions with the signatures of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeGuard

from torch.distributed.checkpoint import FileSystemWriter as TorchFileSystemWriter

from dcp_pipeline.config.compose import load_mapping
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import ConfigError, MissingKeyError
from dcp_pipeline.dcp.reader import FileSystemReader
from dcp_pipeline.dcp.writer import FileSystemWriter
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.pipelines.foreign import ForeignJob, foreign_load_graph, foreign_save_graph
from dcp_pipeline.pipelines.report import LoadReport
from dcp_pipeline.pipelines.together import run_together
from dcp_pipeline.rules.base import matches
from dcp_pipeline.types.dcp import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    AsyncStager,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    DefaultStager,
    LoadPlanner,
    Metadata,
    SavePlanner,
    StagingOptions,
    StorageReader,
    StorageWriter,
)

__all__ = ["async_save", "load", "load_keys", "load_state_dict", "save", "save_state_dict"]

Config = PipelineConfig | Mapping[str, Any] | str | os.PathLike[str] | None
CheckpointId = str | os.PathLike[str] | None


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    config: Config = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state on all ranks together, in place of ``torch.distributed.checkpoint.save``.

    Args:
        state_dict: every rank's part of the state.
        checkpoint_id: path or URI, the same on every rank. A ``memory://`` URI without a config is
            kept in this process's memory.
        config: a :class:`PipelineConfig`, a mapping, or a YAML file.
        storage_writer: one written for DCP, or ours; instead of the config's storage.
        planner: one written for DCP, instead of the config's planner.
        process_group: the ranks that save, ``None`` for all.
        no_dist: save this process alone.
        use_collectives: off, every rank saves on its own, as DCP does it: there is no common
            commit, and only DCP's files, ``__{rank}.metadata`` among them.

    Returns:
        DCP's metadata of what was saved.

    Raises:
        CheckpointException: on every rank, if any failed; nothing was committed then.
        ConfigError: neither ``checkpoint_id`` nor ``storage_writer`` is given.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = save({"weight": torch.ones(2)}, checkpoint_id=path)
        ...     load_keys(path)
        {'weight': tensor([1., 1.])}
    """
    if _is_pipeline(storage_writer) and planner is None and use_collectives:
        # Our own writer with our own planner is a pipeline.
        if checkpoint_id is None:
            checkpoint_id = storage_writer.path
        config, storage_writer = storage_writer.config, None
    if storage_writer is None and planner is None and use_collectives:
        wanted = _named(checkpoint_id)
        with Pipeline(_config(config, wanted)) as pipeline:
            return pipeline.save(state_dict, wanted, process_group=process_group, no_dist=no_dist)
    writer = storage_writer
    if writer is None and not use_collectives:
        writer = TorchFileSystemWriter(_named(checkpoint_id))
    elif writer is None:
        writer = FileSystemWriter(_named(checkpoint_id), config=_config(config, ""))
    writer.reset(checkpoint_id)
    job = _job(planner or DefaultSavePlanner(), writer, config, process_group, no_dist)
    job.use_collectives = use_collectives
    return _save_foreign(state_dict, job)


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    config: Config = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    async_checkpointer_type: AsyncCheckpointerType | None = None,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Save in the background, in place of ``torch.distributed.checkpoint.async_save``.

    The pipeline of a config, with its buffers and its background process, is kept until the program
    ends, and used again by later calls with an equal config. With a :class:`Pipeline` of your own,
    you decide when it is closed.

    Args:
        state_dict, checkpoint_id, config, process_group, no_dist: as in :func:`save`.
        storage_writer, planner: as in :func:`save`. Written for DCP they run in a thread.
        async_checkpointer_type: a thread or a process, ``None`` for the config's ``background``.
        async_stager: one written for DCP; yours to close. ``None`` for the config's.
        use_collectives: as in :func:`save`.

    Returns:
        As :meth:`Pipeline.async_save`.

    Raises:
        CheckpointException: an earlier save of an equal config failed, and nobody has seen it.
        ConfigError: a planner or writer of DCP's, with a background process.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saving = async_save({"weight": torch.ones(2)}, checkpoint_id=path)
        ...     _ = saving.result()
        ...     load_keys(path)
        {'weight': tensor([1., 1.])}
    """
    if _is_pipeline(storage_writer) and planner is None and use_collectives:
        if checkpoint_id is None:
            checkpoint_id = storage_writer.path
        config, storage_writer = storage_writer.config, None
    pipeline = _kept_pipeline(_config(config, os.fspath(checkpoint_id or "")))
    if storage_writer is None and planner is None and use_collectives:
        return pipeline.async_save(
            state_dict,
            _named(checkpoint_id),
            process_group=process_group,
            no_dist=no_dist,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
        )
    is_process = pipeline.config.background.kind == "process"
    if async_checkpointer_type is not None:
        is_process = async_checkpointer_type is AsyncCheckpointerType.PROCESS
    if is_process:
        raise ConfigError(
            "a planner or writer of DCP's, and use_collectives=False, save in a thread of this"
            " process: use async_checkpointer_type=AsyncCheckpointerType.THREAD",
            "background",
        )
    writer = storage_writer
    if writer is None and not use_collectives:
        writer = TorchFileSystemWriter(_named(checkpoint_id))
    elif writer is None:
        writer = FileSystemWriter(_named(checkpoint_id), config=_config(config, ""))
    writer.reset(checkpoint_id)
    if async_stager is None and isinstance(writer, AsyncStager):
        async_stager = writer
    stager = async_stager or DefaultStager(StagingOptions(False, False, False, False))

    def finish(staged: Any, failure: Exception | None, coordinator: Coordinator) -> Metadata:
        job = ForeignJob(coordinator, planner or DefaultSavePlanner(), writer)
        job.use_collectives = use_collectives
        try:
            return _save_foreign(staged, job, failure, in_background=True)
        finally:
            if async_stager is None:
                stager.close()

    return pipeline.async_save_staged(
        state_dict, stager, finish, async_checkpointer_type, process_group, no_dist
    )


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    config: Config = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> LoadReport:
    """Load into a state in place, instead of ``torch.distributed.checkpoint.load``.

    Args:
        state_dict: the template; see :meth:`Pipeline.load`.
        storage_reader, planner: written for DCP, or ours. With either, DCP's protocol and rules
            hold: strictness is the planner's, and a failed load is not rolled back.

    Returns:
        What was loaded; with a reader or planner of DCP's only ``loaded`` and ``trace`` are filled.

    Raises:
        CheckpointException: on every rank, if any failed.
        LoadMismatchError: (also) when the state does not fit the checkpoint; nothing was changed.
    """
    if isinstance(storage_reader, FileSystemReader) and planner is None:
        if checkpoint_id is None:
            checkpoint_id = storage_reader.path
        config, storage_reader = storage_reader.config, None
    if storage_reader is None and planner is None:
        wanted = _named(checkpoint_id)
        with Pipeline(_config(config, wanted)) as pipeline:
            return pipeline.load(state_dict, wanted, process_group=process_group, no_dist=no_dist)
    reader = storage_reader
    if reader is None:
        reader = FileSystemReader(_named(checkpoint_id), config=_config(config, ""))
    reader.reset(checkpoint_id)
    job = _job(planner or DefaultLoadPlanner(), reader, config, process_group, no_dist)
    return _load_foreign(state_dict, job)


def load_keys(
    checkpoint_id: str | os.PathLike[str],
    keys: str | Sequence[str] | None = None,
    *,
    config: Config = None,
) -> dict[str, Any]:
    """Load without a template: whole tensors in host memory, nested as they were saved.

    Args:
        keys: names, names of sections, or globs; ``None`` for everything.

    Raises:
        MissingKeyError: a key that is nowhere in the checkpoint.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as path:
        ...     _ = save({"model": {"w": torch.ones(2)}, "step": 3}, checkpoint_id=path)
        ...     load_keys(path, ["model"]), load_keys(path, ["st*"])
        ({'model': {'w': tensor([1., 1.])}}, {'step': 3})
    """
    keys = [keys] if isinstance(keys, str) else keys
    chosen = _config(config, os.fspath(checkpoint_id)).to_dict()
    if keys is not None:
        chosen["transforms"] = [{"kind": "include", "keys": list(keys), "on": "load"}]
    state: dict[str, Any] = {}
    with Pipeline.from_config(chosen) as pipeline:
        report = pipeline.load(state, checkpoint_id, no_dist=True)
    missing = [key for key in keys or () if not any(matches(n, [key]) for n in report.loaded)]
    if missing:
        raise MissingKeyError(
            f"{report.checkpoint_id} holds nothing named {', '.join(missing)}", missing=missing
        )
    return state


def _is_pipeline(writer: StorageWriter | None) -> TypeGuard[FileSystemWriter]:
    """Whether a writer, with our own planner, does what a pipeline of its config does."""
    return isinstance(writer, FileSystemWriter) and writer.is_pipeline


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """The lower-level save of DCP, with the rank that coordinates."""
    if _is_pipeline(storage_writer) and planner is None:
        with Pipeline(storage_writer.config) as pipeline:
            return pipeline.save(
                state_dict,
                storage_writer.path,
                process_group=process_group,
                no_dist=no_dist,
                coordinator_rank=coordinator_rank,
            )
    storage_writer.reset()
    job = _job(
        planner or DefaultSavePlanner(),
        storage_writer,
        None,
        process_group,
        no_dist,
        coordinator_rank,
    )
    return _save_foreign(state_dict, job)


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: Any = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """The lower-level load of DCP, with the rank that coordinates."""
    if isinstance(storage_reader, FileSystemReader) and planner is None:
        with Pipeline(storage_reader.config) as pipeline:
            return pipeline.load(
                state_dict,
                storage_reader.path,
                process_group=process_group,
                no_dist=no_dist,
                coordinator_rank=coordinator_rank,
            )
    storage_reader.reset()
    job = _job(
        planner or DefaultLoadPlanner(),
        storage_reader,
        None,
        process_group,
        no_dist,
        coordinator_rank,
    )
    return _load_foreign(state_dict, job)


def _named(checkpoint_id: CheckpointId) -> str:
    if checkpoint_id is None:
        raise ConfigError("name the checkpoint: checkpoint_id, or a storage writer or reader", "")
    return os.fspath(checkpoint_id)


def _config(config: Config, checkpoint_id: str) -> PipelineConfig:
    if config is not None:
        return load_mapping(config)
    if checkpoint_id.startswith("memory://"):
        return load_mapping({"storage": "memory"})
    return PipelineConfig()


def _job(
    planner: SavePlanner | LoadPlanner,
    storage: StorageWriter | StorageReader,
    config: Config,
    process_group: Any,
    no_dist: bool,
    coordinator_rank: int = 0,
) -> ForeignJob:
    coordination = _config(config, "").coordination.build()
    coordinator = coordination.coordinator(process_group, no_dist, coordinator_rank)
    return ForeignJob(coordinator, planner, storage)


_KEPT: dict[tuple[int, str], Pipeline] = {}
_KEPT_LOCK = threading.Lock()


def _kept_pipeline(config: PipelineConfig) -> Pipeline:
    """The pipeline that asynchronous saves of this process share, if their configs are equal."""
    key = os.getpid(), config.digest()
    with _KEPT_LOCK:
        if key not in _KEPT:
            _KEPT[key] = Pipeline(config)
        return _KEPT[key]


def _save_foreign(
    state_dict: dict[str, Any],
    job: ForeignJob,
    failure: Exception | None = None,
    in_background: bool = False,
) -> Metadata:
    trace = Trace("save", job.coordinator.rank)
    try:
        inputs = {"state": state_dict, "job": job}
        values = run_together(
            foreign_save_graph(), inputs, job.coordinator, trace, failure, in_background
        )
    except BaseException:
        if isinstance(job.storage, FileSystemWriter):
            job.storage.abandon()
        raise
    metadata: Metadata = values["metadata"]
    return metadata


def _load_foreign(state_dict: dict[str, Any], job: ForeignJob) -> LoadReport:
    trace = Trace("load", job.coordinator.rank)
    inputs = {"state": state_dict, "job": job}
    values = run_together(foreign_load_graph(), inputs, job.coordinator, trace)
    loaded = sorted({item.dest_index.fqn for item in values["share"].items})
    where = str(getattr(job.storage, "checkpoint_id", ""))
    return LoadReport(where, "", loaded, [], [], [], [], [], [], False, 0, trace)
