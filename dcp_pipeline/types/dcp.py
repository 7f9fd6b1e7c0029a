"""The types of ``torch.distributed.checkpoint``, re-exported: a planner or storage writer written
for DCP plugs in here, and ours plug into DCP."""

from __future__ import annotations

from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    TensorStorageMetadata,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    TensorWriteData,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "AsyncStager",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DefaultStager",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StagingOptions",
    "Stateful",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
]
