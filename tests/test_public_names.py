"""The public names: frozen, resolvable, and complete against DCP's."""

import ast
import subprocess
import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    filesystem,
    metadata,
    planner,
    staging,
    state_dict_saver,
    stateful,
    storage,
)

import dcp_pipeline
from dcp_pipeline.core import errors

OURS = {
    "AppState",
    "CastRecord",
    "CheckpointableTensor",
    "CheckpointEvent",
    "CheckpointException",
    "CheckpointManager",
    "ChunkTable",
    "FileSystemReader",
    "FileSystemWriter",
    "Fingerprint",
    "Graph",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadReport",
    "Manifest",
    "MegaStorageReader",
    "MegaStorageWriter",
    "Node",
    "NodeTiming",
    "OptimizerStateType",
    "Pipeline",
    "PipelineBuilder",
    "PipelineConfig",
    "QuantizedHuggingFaceStorageReader",
    "RankLocal",
    "RngState",
    "StateDictOptions",
    "Trace",
    "Where",
    "async_save",
    "fingerprint",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "load_keys",
    "load_recipe",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "register",
    "save",
    "save_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "verify",
}


def test_every_name_resolves() -> None:
    for name in dcp_pipeline.__all__:
        assert getattr(dcp_pipeline, name) is not None


def test_names_of_ours_are_frozen() -> None:
    from dcp_pipeline.types import dcp as types

    error_names = set(errors.__all__) - {"list_some"}
    assert set(dcp_pipeline.__all__) == OURS | error_names | set(types.__all__)


def test_every_public_name_of_dcp_is_here() -> None:
    public = {
        name
        for name in vars(dcp)
        if not name.startswith("_") and not isinstance(vars(dcp)[name], type(sys))
    }
    assert public <= set(dcp_pipeline.__all__)


def test_types_are_torchs_own() -> None:
    modules = (dcp, filesystem, metadata, planner, staging, stateful, state_dict_saver, storage)
    own = {"FileSystemReader", "FileSystemWriter", "CheckpointException", *OURS}
    for name in dcp_pipeline.__all__:
        theirs = next((vars(m)[name] for m in modules if name in vars(m)), None)
        if theirs is not None and name not in own:
            assert getattr(dcp_pipeline, name) is theirs, name


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(dcp_pipeline.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen: dict[str | None, set[str]] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            seen.setdefault(node.module, set()).update(alias.name for alias in node.names)
    assert seen == {module: set(names) for module, names in dcp_pipeline._HOME.items()}


def test_importing_the_package_imports_nothing_else() -> None:
    program = (
        "import sys, dcp_pipeline; print(sorted({'torch', 'hydra', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
