"""``FileSystemWriter``: DCP's storage writer with our files, checksums and commit."""

from __future__ import annotations

import io
import os
import uuid
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.futures import Future

from dcp_pipeline.config.explain import validate
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.coordination.single_process import SingleProcessCoordinator
from dcp_pipeline.core.errors import ConfigError, UnsupportedLeafError
from dcp_pipeline.dcp.commit import PlacedResult, commit_results
from dcp_pipeline.formats.torch_zip import read_value
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.steps.save_agree import start_save
from dcp_pipeline.pipelines.steps.save_write import write_items
from dcp_pipeline.pipelines.values import Receipt
from dcp_pipeline.storage.filesystem import local_path
from dcp_pipeline.types.dcp import (
    Metadata,
    SavePlan,
    SavePlanner,
    SerializationFormat,
    StorageMeta,
    StorageWriter,
    WriteItem,
    WriteItemType,
    WriteResult,
)
from dcp_pipeline.types.dtypes import dtype_name
from dcp_pipeline.types.entries import Item

__all__ = ["FileSystemWriter", "SaveOf"]


@dataclass(frozen=True)
class SaveOf:
    """What the coordinator tells each rank's writer along with its plan."""

    save_id: str
    rank: int


class FileSystemWriter(StorageWriter):
    """Writes a checkpoint with our layout under DCP's ``save`` or ours, with any planner.

    Args:
        path: directory of the checkpoint, a path or a ``file://`` URI.
        sync_files, thread_count, overwrite: as in torch's ``FileSystemWriter``.
        serialization_format: ``TORCH_SAVE``, which plain DCP reads too, or ``SAFETENSORS``.
        config: everything else, as plain data or a :class:`PipelineConfig`; the arguments above are
            put over it where they are given.

    Attributes:
        is_pipeline: whether a pipeline of its config writes the same, so that our own functions
            need nothing else of it.

    Raises:
        ConfigError: a setting that is wrong.
    """

    is_pipeline: bool = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        overwrite: bool | None = None,
        serialization_format: SerializationFormat | None = None,
        config: PipelineConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = _with_arguments(
            config, sync_files, thread_count, overwrite, serialization_format
        )
        self.path = os.fspath(path)
        self._parts = Parts.build(self.config)
        self._job: SaveJob | None = None
        self._rank: int | None = None
        self._use_collectives = True
        self._is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the last save; ``checkpoint_id`` names another directory."""
        self.abandon()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank")
        self._use_collectives = kwargs.get("use_collectives", True)
        if not self._use_collectives:
            raise ConfigError(
                "use_collectives=False leaves a checkpoint that no rank commits; use"
                " torch.distributed.checkpoint.FileSystemWriter for it",
                "use_collectives",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: look at what is there and say that a save is under way."""
        self._job = job = self._new_job(rank=self._rank or 0)
        try:
            start_save(job)
            return self._arranged(job, plans)
        except BaseException:
            self.abandon()
            raise

    def _arranged(self, job: SaveJob, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: the plans, with what each rank's writer has to know."""
        return [
            replace(plan, storage_data=SaveOf(job.save_id, rank)) for rank, plan in enumerate(plans)
        ]

    def _new_job(self, rank: int) -> SaveJob:
        coordinator = SingleProcessCoordinator(rank)
        return SaveJob(self._parts, coordinator, self._parts.storage.open(self.path))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and their digests; all durable when the future is done."""
        save: SaveOf = plan.storage_data
        if self._job is None:
            self._job = self._new_job(save.rank)
        job = self._job
        job.save_id = save.save_id
        try:
            receipt = self._write([self._item(item, planner) for item in plan.items], plan, job)
        except BaseException:
            self.abandon()
            raise
        results: list[WriteResult] = [
            PlacedResult(
                index=item.index,
                size_in_bytes=int(receipt.length[row]),
                storage_data=_StorageInfo(
                    receipt.files[receipt.file[row]].name,
                    int(receipt.offset[row]),
                    int(receipt.length[row]),
                ),
                # Results, and nothing else, get to the coordinator: the first carries the rest.
                receipt=receipt if row == 0 else None,
            )
            for row, item in enumerate(plan.items)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, items: list[Item], plan: SavePlan, job: SaveJob) -> Receipt:
        """Write this rank's items, those of the plan."""
        return write_items(items, job)

    def _item(self, item: WriteItem, planner: SavePlanner) -> Item:
        data = planner.resolve_data(item)
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            return Item(name, (), (), (), None, self._value(data.getvalue()))
        assert isinstance(data, torch.Tensor) and item.tensor_data is not None
        dtype = dtype_name(data.dtype)
        if dtype is None:
            raise UnsupportedLeafError(f"{name!r} is a tensor of dtype {data.dtype}")
        try:
            self._parts.serialization.check_dtype(dtype)
        except UnsupportedLeafError as error:
            raise UnsupportedLeafError(f"{name!r} is {error}") from error
        chunk = item.tensor_data.chunk
        shape = tuple(item.tensor_data.size)
        return Item(name, tuple(chunk.offsets), tuple(data.shape), shape, dtype, data.detach())

    def _value(self, saved: bytes) -> bytes:
        """Bytes that a planner made with ``torch.save``, as the serialization stores them."""
        if self._parts.serialization.dcp_reads:
            return saved
        return self._parts.serialization.encode_value(read_value(saved))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: check the results and commit."""
        assert self._job is not None
        job = self._job
        try:
            self._commit(job, metadata, results)
        except BaseException:
            self.abandon()
            raise
        job.finish()
        self._job = None

    def _commit(self, job: SaveJob, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        commit_results(job, metadata, results)

    def abandon(self) -> None:
        """Remove what was written for a save that did not come to its commit."""
        if self._job is not None:
            self._job.abandon()
            self._job = None

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=uuid.uuid4().hex)

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            local_path(checkpoint_id)
        except ConfigError:
            return False
        return True


def _with_arguments(
    config: PipelineConfig | dict[str, Any] | None,
    sync_files: bool | None,
    thread_count: int | None,
    overwrite: bool | None,
    serialization_format: SerializationFormat | None,
) -> PipelineConfig:
    data = config.to_dict() if isinstance(config, PipelineConfig) else dict(config or {})
    storage = {"sync_files": sync_files, "thread_count": thread_count}
    given = {name: value for name, value in storage.items() if value is not None}
    if given:
        known = data.get("storage", {})
        data["storage"] = ({"kind": known} if isinstance(known, str) else dict(known)) | given
    if overwrite is not None:
        data["overwrite"] = "replace" if overwrite else "error"
    if serialization_format is not None:
        data["serialization"] = SerializationFormat(serialization_format).value
    return validate(data)
