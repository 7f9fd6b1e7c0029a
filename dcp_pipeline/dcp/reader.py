"""``FileSystemReader``: DCP's storage reader over our checkpoints and plain DCP's."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.futures import Future

from dcp_pipeline.config.explain import validate
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.errors import ConfigError, CorruptCheckpointError, MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.formats.metadata_pickle import read_metadata
from dcp_pipeline.formats.torch_zip import write_value
from dcp_pipeline.layout.dcp_metadata import manifest_of, metadata_of
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.steps.data_files import DataFiles
from dcp_pipeline.pipelines.steps.destinations import Destination
from dcp_pipeline.pipelines.steps.read_boxes import row_reads
from dcp_pipeline.pipelines.steps.read_items import Located, locate_rows
from dcp_pipeline.storage.filesystem import local_path
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dcp import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    MetadataIndex,
    ReadItem,
    StorageMeta,
    StorageReader,
)
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["FileSystemReader"]


class FileSystemReader(StorageReader):
    """Reads under DCP's ``load`` or ours, with any planner; verifies what it reads.

    Args:
        path: directory of the checkpoint, a path or a ``file://`` URI.
        config: settings of storage and layout, as plain data or a :class:`PipelineConfig`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: PipelineConfig | dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.config = config if isinstance(config, PipelineConfig) else validate(config or {})
        self.path = os.fspath(path)
        self._parts = Parts.build(self.config)
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the last load; ``checkpoint_id`` names another directory."""
        self._manifest = None
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The commit record as DCP's metadata.

        Args:
            rank: reads that rank's own metadata, as DCP writes it without collectives.
        """
        directory = self._parts.open_to_read(self.path)
        rank = kwargs.get("rank")
        if rank is not None:
            metadata = read_metadata(directory.read(f"__{rank}.metadata"))
            sizes = {name: directory.size(name) for name in directory.names()}
            self._manifest = manifest_of(metadata, sizes)
            if any(entry.size < 0 for entry in self._manifest.files):
                raise MissingFileError(f"a data file of rank {rank} is not in {self.path}")
        else:
            self._manifest = self._parts.layout.open(directory)
            metadata = metadata_of(self._manifest, directory.location)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values that ``planner`` names."""
        assert self._manifest is not None
        manifest = self._manifest
        directory = self._parts.open_to_read(self.path)
        rows = _Rows(manifest)
        wanted = [rows.find(item.storage_index) for item in plan.items]
        values: dict[int, bytes] = {}
        committed: list[tuple[ReadItem, torch.Tensor]] = []
        with DataFiles(manifest, directory, self._parts.storage.thread_count) as files:
            located = locate_rows(manifest, wanted, files.source)
            reads: dict[int, list[Read]] = {}
            for position, (item, row) in enumerate(zip(plan.items, wanted, strict=True)):
                if item.type == LoadItemType.BYTE_IO:
                    file = int(manifest.table.file[row])
                    read = _value_read(located, row, position, item, values)
                    reads.setdefault(file, []).append(read)
                    continue
                target = planner.resolve_tensor(item)
                committed.append((item, target))
                for file, read in _tensor_reads(located, row, item, target):
                    reads.setdefault(file, []).append(read)
            files.run(reads)
        for item, target in committed:
            planner.commit_tensor(item, target)
        for position, item in enumerate(plan.items):
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._value(values[position])))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _value(self, stored: bytes) -> bytes:
        """A stored value as ``torch.save`` writes it, which is what planners read."""
        assert self._manifest is not None
        if self._manifest.serialization == "torch_save":
            return stored
        serialization = self._parts.serialization_of(self._manifest.serialization)
        return write_value(serialization.decode_value(stored))

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


class _Rows:
    """The rows of a manifest by DCP's index."""

    def __init__(self, manifest: Manifest) -> None:
        table = manifest.table
        keys = {name: spec.alias if spec.alias >= 0 else key for key, (name, spec) in enumerate(
            zip(manifest.names, table.keys, strict=True)
        )}  # fmt: skip
        self._keys = keys
        self._rows = {
            (int(key), table.boxes(row)[0]): row for row, key in enumerate(table.key.tolist())
        }

    def find(self, index: MetadataIndex) -> int:
        offset = tuple(index.offset) if index.offset is not None else ()
        row = self._rows.get((self._keys.get(index.fqn, -1), offset))
        if row is None:
            raise CorruptCheckpointError(f"the checkpoint has no chunk of {index.fqn} at {offset}")
        return row


def _value_read(
    located: Located, row: int, position: int, item: ReadItem, values: dict[int, bytes]
) -> Read:
    table = located.table

    def deliver(data: memoryview) -> None:
        values[position] = bytes(data)

    start = int(table.offset[row] + table.payload[row])
    length = int(table.length[row] - table.payload[row])
    return Read(start, length, item.storage_index.fqn, deliver=deliver)


def _tensor_reads(
    located: Located, row: int, item: ReadItem, target: torch.Tensor
) -> list[tuple[int, Read]]:
    spec = located.table.keys[located.table.key[row]]
    assert spec.dtype is not None
    dtype = DTYPES[spec.dtype]
    # DCP converts silently; a planner that does not want that compares dtypes itself.
    on_cast = None if target.dtype == dtype else _ignore
    view = target.detach()
    if tuple(view.shape) != tuple(item.lengths):
        raise CorruptCheckpointError(
            f"{item.storage_index.fqn}: {list(item.lengths)} are to be read into {list(view.shape)}"
        )
    destination = Destination(item.storage_index.fqn, dtype, view, on_cast)
    if 0 in item.lengths:
        return []
    begin, extent = tuple(item.storage_offsets), tuple(item.lengths)
    return list(row_reads(located, row, begin, extent, destination))


def _ignore(lost: int) -> None:
    return None
