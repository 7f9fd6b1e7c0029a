"""A declarative checkpoint pipeline for distributed PyTorch training.

Names are imported when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_pipeline.api import (
        load as load,
    )
    from dcp_pipeline.api import (
        load_keys as load_keys,
    )
    from dcp_pipeline.api import (
        load_state_dict as load_state_dict,
    )
    from dcp_pipeline.api import (
        save as save,
    )
    from dcp_pipeline.api import (
        save_state_dict as save_state_dict,
    )
    from dcp_pipeline.builder import (
        PipelineBuilder as PipelineBuilder,
    )
    from dcp_pipeline.config.model import (
        PipelineConfig as PipelineConfig,
    )
    from dcp_pipeline.core.errors import (
        CheckpointError as CheckpointError,
    )
    from dcp_pipeline.core.errors import (
        CheckpointExistsError as CheckpointExistsError,
    )
    from dcp_pipeline.core.errors import (
        CheckpointNotFoundError as CheckpointNotFoundError,
    )
    from dcp_pipeline.core.errors import (
        ChecksumError as ChecksumError,
    )
    from dcp_pipeline.core.errors import (
        ConcurrentSaveError as ConcurrentSaveError,
    )
    from dcp_pipeline.core.errors import (
        ConfigError as ConfigError,
    )
    from dcp_pipeline.core.errors import (
        CoordinationError as CoordinationError,
    )
    from dcp_pipeline.core.errors import (
        CorruptCheckpointError as CorruptCheckpointError,
    )
    from dcp_pipeline.core.errors import (
        DisagreementError as DisagreementError,
    )
    from dcp_pipeline.core.errors import (
        DtypeMismatchError as DtypeMismatchError,
    )
    from dcp_pipeline.core.errors import (
        ForeignOverwriteError as ForeignOverwriteError,
    )
    from dcp_pipeline.core.errors import (
        FormatError as FormatError,
    )
    from dcp_pipeline.core.errors import (
        GraphError as GraphError,
    )
    from dcp_pipeline.core.errors import (
        IncompleteCheckpointError as IncompleteCheckpointError,
    )
    from dcp_pipeline.core.errors import (
        LoadMismatchError as LoadMismatchError,
    )
    from dcp_pipeline.core.errors import (
        MissingFileError as MissingFileError,
    )
    from dcp_pipeline.core.errors import (
        MissingKeyError as MissingKeyError,
    )
    from dcp_pipeline.core.errors import (
        NewerFormatError as NewerFormatError,
    )
    from dcp_pipeline.core.errors import (
        NotDistributedError as NotDistributedError,
    )
    from dcp_pipeline.core.errors import (
        PeerFailedError as PeerFailedError,
    )
    from dcp_pipeline.core.errors import (
        RemoteError as RemoteError,
    )
    from dcp_pipeline.core.errors import (
        ReplicaMismatchError as ReplicaMismatchError,
    )
    from dcp_pipeline.core.errors import (
        RollbackFailedError as RollbackFailedError,
    )
    from dcp_pipeline.core.errors import (
        ShapeConflictError as ShapeConflictError,
    )
    from dcp_pipeline.core.errors import (
        ShapeMismatchError as ShapeMismatchError,
    )
    from dcp_pipeline.core.errors import (
        StateError as StateError,
    )
    from dcp_pipeline.core.errors import (
        StorageError as StorageError,
    )
    from dcp_pipeline.core.errors import (
        TilingError as TilingError,
    )
    from dcp_pipeline.core.errors import (
        UnexpectedKeyError as UnexpectedKeyError,
    )
    from dcp_pipeline.core.errors import (
        UnsafeCheckpointError as UnsafeCheckpointError,
    )
    from dcp_pipeline.core.errors import (
        UnsupportedLeafError as UnsupportedLeafError,
    )
    from dcp_pipeline.core.manifest import (
        Manifest as Manifest,
    )
    from dcp_pipeline.core.registry import (
        register as register,
    )
    from dcp_pipeline.core.table import (
        ChunkTable as ChunkTable,
    )
    from dcp_pipeline.dcp import (
        FileSystemReader as FileSystemReader,
    )
    from dcp_pipeline.dcp import (
        FileSystemWriter as FileSystemWriter,
    )
    from dcp_pipeline.graph.graph import (
        Graph as Graph,
    )
    from dcp_pipeline.graph.node import (
        Node as Node,
    )
    from dcp_pipeline.graph.node import (
        Where as Where,
    )
    from dcp_pipeline.graph.trace import (
        NodeTiming as NodeTiming,
    )
    from dcp_pipeline.graph.trace import (
        Trace as Trace,
    )
    from dcp_pipeline.manager import (
        CheckpointManager as CheckpointManager,
    )
    from dcp_pipeline.pipeline import (
        Pipeline as Pipeline,
    )
    from dcp_pipeline.pipelines.report import (
        CastRecord as CastRecord,
    )
    from dcp_pipeline.pipelines.report import (
        LoadReport as LoadReport,
    )
    from dcp_pipeline.state.app_state import (
        AppState as AppState,
    )
    from dcp_pipeline.tools.verify import (
        verify as verify,
    )
    from dcp_pipeline.types.dcp import (
        AsyncStager as AsyncStager,
    )
    from dcp_pipeline.types.dcp import (
        BytesStorageMetadata as BytesStorageMetadata,
    )
    from dcp_pipeline.types.dcp import (
        ChunkStorageMetadata as ChunkStorageMetadata,
    )
    from dcp_pipeline.types.dcp import (
        DefaultLoadPlanner as DefaultLoadPlanner,
    )
    from dcp_pipeline.types.dcp import (
        DefaultSavePlanner as DefaultSavePlanner,
    )
    from dcp_pipeline.types.dcp import (
        LoadItemType as LoadItemType,
    )
    from dcp_pipeline.types.dcp import (
        LoadPlan as LoadPlan,
    )
    from dcp_pipeline.types.dcp import (
        LoadPlanner as LoadPlanner,
    )
    from dcp_pipeline.types.dcp import (
        Metadata as Metadata,
    )
    from dcp_pipeline.types.dcp import (
        MetadataIndex as MetadataIndex,
    )
    from dcp_pipeline.types.dcp import (
        ReadItem as ReadItem,
    )
    from dcp_pipeline.types.dcp import (
        SavePlan as SavePlan,
    )
    from dcp_pipeline.types.dcp import (
        SavePlanner as SavePlanner,
    )
    from dcp_pipeline.types.dcp import (
        SerializationFormat as SerializationFormat,
    )
    from dcp_pipeline.types.dcp import (
        Stateful as Stateful,
    )
    from dcp_pipeline.types.dcp import (
        StorageMeta as StorageMeta,
    )
    from dcp_pipeline.types.dcp import (
        StorageReader as StorageReader,
    )
    from dcp_pipeline.types.dcp import (
        StorageWriter as StorageWriter,
    )
    from dcp_pipeline.types.dcp import (
        TensorProperties as TensorProperties,
    )
    from dcp_pipeline.types.dcp import (
        TensorStorageMetadata as TensorStorageMetadata,
    )
    from dcp_pipeline.types.dcp import (
        TensorWriteData as TensorWriteData,
    )
    from dcp_pipeline.types.dcp import (
        WriteItem as WriteItem,
    )
    from dcp_pipeline.types.dcp import (
        WriteItemType as WriteItemType,
    )
    from dcp_pipeline.types.dcp import (
        WriteResult as WriteResult,
    )
    from dcp_pipeline.types.exceptions import (
        CheckpointException as CheckpointException,
    )

_HOME = {
    "dcp_pipeline.api": (
        "load",
        "load_keys",
        "load_state_dict",
        "save",
        "save_state_dict",
    ),
    "dcp_pipeline.builder": ("PipelineBuilder",),
    "dcp_pipeline.config.model": ("PipelineConfig",),
    "dcp_pipeline.core.errors": (
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "ChecksumError",
        "ConcurrentSaveError",
        "ConfigError",
        "CoordinationError",
        "CorruptCheckpointError",
        "DisagreementError",
        "DtypeMismatchError",
        "ForeignOverwriteError",
        "FormatError",
        "GraphError",
        "IncompleteCheckpointError",
        "LoadMismatchError",
        "MissingFileError",
        "MissingKeyError",
        "NewerFormatError",
        "NotDistributedError",
        "PeerFailedError",
        "RemoteError",
        "ReplicaMismatchError",
        "RollbackFailedError",
        "ShapeConflictError",
        "ShapeMismatchError",
        "StateError",
        "StorageError",
        "TilingError",
        "UnexpectedKeyError",
        "UnsafeCheckpointError",
        "UnsupportedLeafError",
    ),
    "dcp_pipeline.core.manifest": ("Manifest",),
    "dcp_pipeline.core.registry": ("register",),
    "dcp_pipeline.core.table": ("ChunkTable",),
    "dcp_pipeline.dcp": (
        "FileSystemReader",
        "FileSystemWriter",
    ),
    "dcp_pipeline.graph.graph": ("Graph",),
    "dcp_pipeline.graph.node": (
        "Node",
        "Where",
    ),
    "dcp_pipeline.graph.trace": (
        "NodeTiming",
        "Trace",
    ),
    "dcp_pipeline.manager": ("CheckpointManager",),
    "dcp_pipeline.pipeline": ("Pipeline",),
    "dcp_pipeline.pipelines.report": (
        "CastRecord",
        "LoadReport",
    ),
    "dcp_pipeline.state.app_state": ("AppState",),
    "dcp_pipeline.tools.verify": ("verify",),
    "dcp_pipeline.types.dcp": (
        "AsyncStager",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "DefaultLoadPlanner",
        "DefaultSavePlanner",
        "LoadItemType",
        "LoadPlan",
        "LoadPlanner",
        "Metadata",
        "MetadataIndex",
        "ReadItem",
        "SavePlan",
        "SavePlanner",
        "SerializationFormat",
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
    ),
    "dcp_pipeline.types.exceptions": ("CheckpointException",),
}
"""Module to public names; a test compares it with the imports above, which type checkers read."""

_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
