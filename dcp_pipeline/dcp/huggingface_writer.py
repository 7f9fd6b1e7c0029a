"""``HuggingFaceStorageWriter``: model repositories under DCP's ``save`` and ours."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    RuleError,
    ShapeConflictError,
    UnsupportedLeafError,
    list_some,
)
from dcp_pipeline.core.manifest import FileEntry
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.core.tiling import check_tiling
from dcp_pipeline.dcp.writer import FileSystemWriter, SaveOf
from dcp_pipeline.layout.export import ExportLayout
from dcp_pipeline.layout.huggingface_shards import HuggingFaceShards
from dcp_pipeline.layout.huggingface_writing import check_holdable
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.steps.export_commit import exported, fill_headers
from dcp_pipeline.pipelines.steps.export_write import write_placed
from dcp_pipeline.pipelines.steps.save_commit import publish_export, versions
from dcp_pipeline.pipelines.steps.save_write import write_items
from dcp_pipeline.pipelines.values import Places, Receipt
from dcp_pipeline.serialization.huggingface_shards import ShardSerialization
from dcp_pipeline.types.dcp import Metadata, SavePlan, StorageMeta, WriteItem, WriteResult
from dcp_pipeline.types.dtypes import dtype_name
from dcp_pipeline.types.entries import Item

__all__ = ["HuggingFaceStorageWriter"]

_ONE_FILE: Final = 1 << 62


@dataclass(frozen=True)
class _PlacedSave(SaveOf):
    """Where the items of a rank's plan go, in files that all ranks write."""

    places: Places


class HuggingFaceStorageWriter(FileSystemWriter):
    """Writes a model repository, with the arguments of torch's class of that name.

    All ranks write their parts of the final files at once, whatever they hold of the tensors: there
    are no shards to be consolidated, and no ``sharded`` folder. Only ``save_distributed=True`` with
    ``enable_consolidation=False`` asks for sharded files, which torch's reader and ours put
    together.

    Args:
        path: directory of the repository, a path or a ``file://`` URI.
        fqn_to_index_mapping: the number of the file, from 1 on, that each key is written to;
            ``None`` for one file.
        thread_count: threads that write.
        save_distributed, enable_consolidation: see above.
        thread_count_consolidation: threads that write final files, if it is more.
        sync_files, overwrite: as in torch's ``FileSystemWriter``. Sharded files never replace
            others, since nothing tells which of them belong together.
        layout: settings of the final files, see :class:`HuggingFaceLayoutConfig`: with
            ``{"max_shard_size": "5GB"}`` they are filled one after another.

    Raises:
        ConfigError: a setting that is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fqn_to_index_mapping: dict[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
        *,
        sync_files: bool | None = None,
        overwrite: bool | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        is_sharded = save_distributed and not enable_consolidation
        threads = thread_count if is_sharded else max(thread_count, thread_count_consolidation)
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=threads,
            overwrite=overwrite,
            config={
                "layout": {
                    "kind": "huggingface",
                    "fqn_to_index_mapping": fqn_to_index_mapping,
                    "max_shard_size": _ONE_FILE,
                    # DCP knows nothing of ties.
                    "tied": "write",
                    **(layout or {}),
                },
                "serialization": "safetensors",
            },
        )
        self._keys: list[str] = []
        self._specs: list[KeySpec] = []
        self._file_of = fqn_to_index_mapping
        self._shards = HuggingFaceShards(fqn_to_index_mapping) if is_sharded else None
        self.is_pipeline = not is_sharded
        if self._shards is not None:
            self._parts = replace(
                self._parts, layout=self._shards, serialization=ShardSerialization()
            )

    def _arranged(self, job: SaveJob, plans: list[SavePlan]) -> list[SavePlan]:
        keys: dict[str, int] = {}
        self._specs = []
        for item in (item for plan in plans for item in plan.items):
            if item.index.fqn not in keys:
                keys[item.index.fqn] = len(keys)
                self._specs.append(_spec_of(item))
        self._keys = list(keys)
        check_holdable(self._keys, self._specs)
        _check_tiling(plans, keys, self._specs)
        if self._shards is not None:
            return super()._arranged(job, self._by_file(plans, self._shards))
        layout = job.parts.layout
        assert isinstance(layout, ExportLayout) and job.plan is not None
        files = layout.plan_files(job.directory, self._keys, self._specs, job.save_id, False)
        job.plan = replace(job.plan, files=tuple(files))
        file_of, start_of = np.zeros((2, len(keys)), np.int64)
        for number, file in enumerate(files):
            file_of[list(file.keys)], start_of[list(file.keys)] = number, file.starts
        names = tuple((file.part, file.size) for file in files)
        arranged = []
        for rank, plan in enumerate(plans):
            rows = [keys[item.index.fqn] for item in plan.items]
            places = Places(names, file_of[rows], start_of[rows])
            arranged.append(replace(plan, storage_data=_PlacedSave(job.save_id, rank, places)))
        return arranged

    def _by_file(self, plans: list[SavePlan], shards: HuggingFaceShards) -> list[SavePlan]:
        """The plans with their items in the order of the files."""
        if self._file_of is not None:
            lacking = [key for key in self._keys if key not in self._file_of]
            if lacking:
                problems = [f"no file is given for {key!r}" for key in lacking]
                raise RuleError.of(problems, "fqn_to_index_mapping")
        return [
            replace(
                plan, items=sorted(plan.items, key=lambda item: shards.number_of(item.index.fqn))
            )
            for plan in plans
        ]

    def _write(self, items: list[Item], plan: SavePlan, job: SaveJob) -> Receipt:
        _check_planned(items, plan.items)
        if self._shards is not None:
            numbers = [self._shards.number_of(item.name) for item in items]
            ends = np.cumsum([len(list(group)) for _, group in groupby(numbers)]).tolist()
            parts = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
            return write_items(items, job, parts=parts)
        places: Places = plan.storage_data.places
        receipt = write_placed(items, places, job)
        return replace(
            receipt,
            files=tuple(FileEntry(name, size) for name, size in places.files),
            file=places.file,
            offset=places.start,
            length=np.asarray([_nbytes(item) for item in items], np.int64),
        )

    def _commit(self, job: SaveJob, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._shards is not None:
            super()._commit(job, metadata, results)
            return
        layout = job.parts.layout
        assert isinstance(layout, ExportLayout) and job.plan is not None
        written = {result.index for rank in results for result in rank}
        lacking = sorted(set(self._keys) - {index.fqn for index in written})
        if lacking:
            raise CorruptCheckpointError(f"no rank reports to have written {list_some(lacking)}")
        manifest = replace(
            exported(self._keys, self._specs, job, versions()), world_size=len(results)
        )
        publish_export(job, layout, manifest, fill_headers(job, layout, manifest))
        final = {file.part: file.final for file in job.plan.files}
        metadata.storage_data = {
            result.index: replace(
                result.storage_data, relative_path=final[result.storage_data.relative_path]
            )
            for rank in results
            for result in rank
        }
        metadata.storage_meta = StorageMeta(
            checkpoint_id=job.directory.location, save_id=job.save_id
        )


def _spec_of(item: WriteItem) -> KeySpec:
    path = (item.index.fqn,)
    if item.tensor_data is None:
        return KeySpec(path, Kind.VALUE)
    dtype = dtype_name(item.tensor_data.properties.dtype)
    if dtype is None:
        raise UnsupportedLeafError(
            f"{item.index.fqn!r} is a tensor of dtype {item.tensor_data.properties.dtype}"
        )
    return KeySpec(path, Kind.TENSOR, dtype, tuple(item.tensor_data.size))


def _nbytes(item: Item) -> int:
    assert not isinstance(item.data, bytes)
    return item.data.numel() * item.data.element_size()


def _check_tiling(
    plans: Sequence[SavePlan], keys: Mapping[str, int], specs: Sequence[KeySpec]
) -> None:
    """What no rank writes would be zeros in the file."""
    chunks = [
        (rank, keys[item.index.fqn], item.tensor_data.chunk)
        for rank, plan in enumerate(plans)
        for item in plan.items
        if item.tensor_data is not None and 0 not in item.tensor_data.chunk.sizes
    ]
    table = ChunkTable.build(
        specs,
        [key for _, key, _ in chunks],
        [tuple(chunk.offsets) for _, _, chunk in chunks],
        [tuple(chunk.sizes) for _, _, chunk in chunks],
    )
    ranks = np.asarray([rank for rank, _, _ in chunks], np.int64)
    check_tiling(replace(table, owner=ranks).sort(), np.zeros(len(specs), bool))


def _check_planned(items: Sequence[Item], planned: Sequence[WriteItem]) -> None:
    """A planner may hand over something else than it has planned, which would not fit."""
    for item, plan in zip(items, planned, strict=True):
        assert plan.tensor_data is not None
        wanted = dtype_name(plan.tensor_data.properties.dtype), tuple(plan.tensor_data.chunk.sizes)
        if (item.dtype, item.sizes) != wanted:
            raise ShapeConflictError(
                f"{item.name!r} was planned as {wanted[0]} {list(wanted[1])}, and is {item.dtype}"
                f" {list(item.sizes)} when it is written"
            )
