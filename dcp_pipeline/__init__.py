"""A declarative checkpoint pipeline for distributed PyTorch training.

Names are imported when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcp_pipeline.api import (
        async_save as async_save,
        load as load,
        load_keys as load_keys,
        load_state_dict as load_state_dict,
        save as save,
        save_state_dict as save_state_dict,
    )
    from dcp_pipeline.builder import (
        PipelineBuilder as PipelineBuilder,
    )
    from dcp_pipeline.config.compose import (
        load_recipe as load_recipe,
    )
    from dcp_pipeline.config.model import (
        PipelineConfig as PipelineConfig,
    )
    from dcp_pipeline.core.errors import (
        BackgroundDiedError as BackgroundDiedError,
        CheckpointError as CheckpointError,
        CheckpointExistsError as CheckpointExistsError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        ChecksumError as ChecksumError,
        ConcurrentSaveError as ConcurrentSaveError,
        ConfigError as ConfigError,
        CoordinationError as CoordinationError,
        CorruptCheckpointError as CorruptCheckpointError,
        DisagreementError as DisagreementError,
        DtypeMismatchError as DtypeMismatchError,
        ForeignOverwriteError as ForeignOverwriteError,
        FormatError as FormatError,
        GraphError as GraphError,
        IncompleteCheckpointError as IncompleteCheckpointError,
        LoadMismatchError as LoadMismatchError,
        MissingFileError as MissingFileError,
        MissingKeyError as MissingKeyError,
        NewerFormatError as NewerFormatError,
        NotDistributedError as NotDistributedError,
        PeerFailedError as PeerFailedError,
        RemoteError as RemoteError,
        ReplicaMismatchError as ReplicaMismatchError,
        RollbackFailedError as RollbackFailedError,
        RuleError as RuleError,
        RulesMismatchError as RulesMismatchError,
        ShapeConflictError as ShapeConflictError,
        ShapeMismatchError as ShapeMismatchError,
        StateError as StateError,
        StorageError as StorageError,
        TilingError as TilingError,
        UnexpectedKeyError as UnexpectedKeyError,
        UnfinishedCommitError as UnfinishedCommitError,
        UnsafeCheckpointError as UnsafeCheckpointError,
        UnsupportedLeafError as UnsupportedLeafError,
        WorldSizeMismatchError as WorldSizeMismatchError,
    )
    from dcp_pipeline.core.fingerprint import (
        Fingerprint as Fingerprint,
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
        FileSystemWriter as FileSystemWriter,
        HuggingFaceStorageReader as HuggingFaceStorageReader,
        HuggingFaceStorageWriter as HuggingFaceStorageWriter,
        MegaStorageReader as MegaStorageReader,
        MegaStorageWriter as MegaStorageWriter,
        QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader,
    )
    from dcp_pipeline.graph.graph import (
        Graph as Graph,
    )
    from dcp_pipeline.graph.node import (
        Node as Node,
        Where as Where,
    )
    from dcp_pipeline.graph.trace import (
        NodeTiming as NodeTiming,
        Trace as Trace,
    )
    from dcp_pipeline.manager import (
        CheckpointEvent as CheckpointEvent,
        CheckpointManager as CheckpointManager,
    )
    from dcp_pipeline.pipeline import (
        Pipeline as Pipeline,
    )
    from dcp_pipeline.pipelines.fingerprinting import (
        fingerprint as fingerprint,
    )
    from dcp_pipeline.pipelines.report import (
        CastRecord as CastRecord,
        LoadReport as LoadReport,
    )
    from dcp_pipeline.sharded_optimizer import (
        load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
    )
    from dcp_pipeline.state.app_state import (
        AppState as AppState,
    )
    from dcp_pipeline.state.checkpointable import (
        CheckpointableTensor as CheckpointableTensor,
    )
    from dcp_pipeline.state.helpers import (
        OptimizerStateType as OptimizerStateType,
        StateDictOptions as StateDictOptions,
        get_model_state_dict as get_model_state_dict,
        get_optimizer_state_dict as get_optimizer_state_dict,
        get_state_dict as get_state_dict,
        set_model_state_dict as set_model_state_dict,
        set_optimizer_state_dict as set_optimizer_state_dict,
        set_state_dict as set_state_dict,
    )
    from dcp_pipeline.state.rank_local import (
        RankLocal as RankLocal,
    )
    from dcp_pipeline.state.rng import (
        RngState as RngState,
    )
    from dcp_pipeline.tools.verify import (
        verify as verify,
    )
    from dcp_pipeline.types.dcp import (
        AsyncCheckpointerType as AsyncCheckpointerType,
        AsyncSaveResponse as AsyncSaveResponse,
        AsyncStager as AsyncStager,
        BytesStorageMetadata as BytesStorageMetadata,
        ChunkStorageMetadata as ChunkStorageMetadata,
        DefaultLoadPlanner as DefaultLoadPlanner,
        DefaultSavePlanner as DefaultSavePlanner,
        DefaultStager as DefaultStager,
        LoadItemType as LoadItemType,
        LoadPlan as LoadPlan,
        LoadPlanner as LoadPlanner,
        Metadata as Metadata,
        MetadataIndex as MetadataIndex,
        ReadItem as ReadItem,
        SavePlan as SavePlan,
        SavePlanner as SavePlanner,
        SerializationFormat as SerializationFormat,
        StagingOptions as StagingOptions,
        Stateful as Stateful,
        StorageMeta as StorageMeta,
        StorageReader as StorageReader,
        StorageWriter as StorageWriter,
        TensorProperties as TensorProperties,
        TensorStorageMetadata as TensorStorageMetadata,
        TensorWriteData as TensorWriteData,
        WriteItem as WriteItem,
        WriteItemType as WriteItemType,
        WriteResult as WriteResult,
    )
    from dcp_pipeline.types.exceptions import (
        CheckpointException as CheckpointException,
    )

_HOME = {
    "dcp_pipeline.api": (
        "async_save",
        "load",
        "load_keys",
        "load_state_dict",
        "save",
        "save_state_dict",
    ),
    "dcp_pipeline.builder": ("PipelineBuilder",),
    "dcp_pipeline.config.compose": ("load_recipe",),
    "dcp_pipeline.config.model": ("PipelineConfig",),
    "dcp_pipeline.core.errors": (
        "BackgroundDiedError",
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
        "RuleError",
        "RulesMismatchError",
        "ShapeConflictError",
        "ShapeMismatchError",
        "StateError",
        "StorageError",
        "TilingError",
        "UnfinishedCommitError",
        "UnexpectedKeyError",
        "UnsafeCheckpointError",
        "UnsupportedLeafError",
        "WorldSizeMismatchError",
    ),
    "dcp_pipeline.core.fingerprint": ("Fingerprint",),
    "dcp_pipeline.core.manifest": ("Manifest",),
    "dcp_pipeline.core.registry": ("register",),
    "dcp_pipeline.core.table": ("ChunkTable",),
    "dcp_pipeline.dcp": (
        "FileSystemReader",
        "FileSystemWriter",
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
        "MegaStorageReader",
        "MegaStorageWriter",
        "QuantizedHuggingFaceStorageReader",
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
    "dcp_pipeline.manager": ("CheckpointEvent", "CheckpointManager"),
    "dcp_pipeline.pipeline": ("Pipeline",),
    "dcp_pipeline.pipelines.fingerprinting": ("fingerprint",),
    "dcp_pipeline.pipelines.report": (
        "CastRecord",
        "LoadReport",
    ),
    "dcp_pipeline.sharded_optimizer": ("load_sharded_optimizer_state_dict",),
    "dcp_pipeline.state.app_state": ("AppState",),
    "dcp_pipeline.state.checkpointable": ("CheckpointableTensor",),
    "dcp_pipeline.state.helpers": (
        "OptimizerStateType",
        "StateDictOptions",
        "get_model_state_dict",
        "get_optimizer_state_dict",
        "get_state_dict",
        "set_model_state_dict",
        "set_optimizer_state_dict",
        "set_state_dict",
    ),
    "dcp_pipeline.state.rank_local": ("RankLocal",),
    "dcp_pipeline.state.rng": ("RngState",),
    "dcp_pipeline.tools.verify": ("verify",),
    "dcp_pipeline.types.dcp": (
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
