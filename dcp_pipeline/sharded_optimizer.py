"""The state of an optimizer, sharded as the model's parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from dcp_pipeline.api import load_state_dict
from dcp_pipeline.core.errors import MissingKeyError
from dcp_pipeline.core.path import Index
from dcp_pipeline.dcp import FileSystemReader
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.state.assigning import put_at
from dcp_pipeline.types.dcp import (
    LoadPlanner,
    Metadata,
    StorageReader,
    TensorStorageMetadata,
)

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load the state of an optimizer, whatever the layout that it was saved on.

    torch's function of this name is for FSDP1; this one takes a model on any layout.

    Args:
        model_state_dict: name to parameter, a ``DTensor``, ``ShardedTensor`` or plain tensor. State
            of a parameter's shape is sharded as it is; what is of another shape is whole.
        optimizer_key: where the checkpoint has the optimizer's state: the section that holds
            ``state`` and ``param_groups``, or keys of the flat layout; dotted, if it lies deeper.
        storage_reader: of the checkpoint.
        planner: one of DCP's, to choose what is loaded.

    Returns:
        ``{optimizer_key: state}``, nested as it was saved.

    Raises:
        MissingKeyError: the checkpoint has nothing at ``optimizer_key``.
    """
    metadata = storage_reader.read_metadata()
    parameters = {name: value for name, value in model_state_dict.items() if _has_shape(value)}
    template: dict[Any, Any] = {}
    depth = 0
    for name, path in (metadata.planner_data or {}).items():
        inside = _depth_of(path, optimizer_key)
        if inside and name in metadata.state_dict_metadata:
            depth = inside
            place = tuple(Index(part) if isinstance(part, int) else part for part in path)
            put_at(template, place, _place_for(name, metadata, parameters))
    if not template:
        raise MissingKeyError(
            f"the checkpoint has nothing at {optimizer_key!r}", missing=[optimizer_key]
        )
    if isinstance(storage_reader, FileSystemReader) and planner is None:
        config = storage_reader.config.to_dict()
        # Nobody asks for the rest.
        only = {"kind": "include", "keys": [f"{optimizer_key}.*"], "on": "load"}
        with Pipeline.from_config(config | {"transforms": [*config["transforms"], only]}) as pipe:
            pipe.load(template, storage_reader.path)
    else:
        load_state_dict(template, storage_reader, planner=planner)
    found: Any = template
    for key in _keys_above(template, depth):
        found = found[key]
    return {optimizer_key: found}


def _depth_of(path: Any, optimizer_key: str) -> int:
    """How many keys of a path make up ``optimizer_key``; 0 if it lies elsewhere."""
    for depth in range(1, len(path)):
        if ".".join(map(str, path[:depth])) == optimizer_key:
            return depth
    return 0


def _keys_above(tree: Any, depth: int) -> list[Any]:
    """The keys of the first ``depth`` levels, each of which holds one."""
    keys = []
    for _ in range(depth):
        (key,) = tree
        keys.append(key)
        tree = tree[key]
    return keys


def _has_shape(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, ShardedTensor))


def _place_for(name: str, metadata: Metadata, parameters: Mapping[str, Any]) -> Any:
    """What a stored value is read into; ``None`` for what is no tensor."""
    stored = metadata.state_dict_metadata[name]
    if not isinstance(stored, TensorStorageMetadata):
        return None
    dtype = stored.properties.dtype
    like = _parameter_in(name, parameters)
    if like is None or tuple(like.shape) != tuple(stored.size):
        return torch.empty(stored.size, dtype=dtype, device="cpu")
    if isinstance(like, ShardedTensor):
        return _sharded_like(like, dtype)
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


def _parameter_in(name: str, parameters: Mapping[str, Any]) -> Any:
    """The parameter whose name stands in that of a value, the longest of several."""
    parts = name.split(".")
    spans = (
        ".".join(parts[begin:end])
        for begin in range(1, len(parts))
        for end in range(len(parts), begin, -1)
    )
    return next((parameters[span] for span in spans if span in parameters), None)


def _sharded_like(like: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    whole = like.metadata()
    shards = [
        Shard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in like.local_shards()
    ]
    properties = replace(whole.tensor_properties, dtype=dtype)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        replace(whole, tensor_properties=properties),
        process_group=like._process_group,
    )
