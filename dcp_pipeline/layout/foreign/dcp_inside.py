"""Kinds whose tensors lie in checkpoints of plain DCP: of Accelerate, and Megatron's torch_dist.

Sources: Accelerate's ``save_fsdp_model`` and ``save_fsdp_optimizer``, which make a folder
``pytorch_model_fsdp_{i}`` or ``optimizer_{i}`` for each model and optimizer; Megatron-core's
``dist_checkpointing``, whose ``metadata.json`` names the backends and whose ``common.pt`` has what
is not sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from dcp_pipeline.core.errors import CheckpointNotFoundError, FormatError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.dcp import DcpLayout
from dcp_pipeline.layout.foreign.building import Building, opened_tree
from dcp_pipeline.layout.huggingface_index import read_json
from dcp_pipeline.storage.base import Directory

__all__ = ["ACCELERATE_FOLDER", "MEGATRON_CLASSES", "open_accelerate", "open_megatron_dist"]

ACCELERATE_FOLDER: Final = re.compile(r"(pytorch_model_fsdp|optimizer)_(0|[1-9]\d{0,5})")

_MOST_JSON: Final = 1 << 20
MEGATRON_CLASSES: Final = ("argparse", "types", "enum", "megatron", "numpy", "transformer_engine")
"""Modules whose objects Megatron leaves beside its tensors."""


def open_accelerate(
    directory: Directory, folders: list[str], open_below: Callable[[str], Directory]
) -> Manifest:
    """Models and optimizers of a folder that ``Accelerator.save_state`` wrote.

    The first model's keys begin with ``model.``, the next one's with ``model_1.``; likewise
    ``optimizer.`` and ``optimizer_1.``.

    Args:
        folders: that lie in it.
        open_below: opens one of them.
    """
    building = Building(directory, "accelerate")
    found = sorted(
        (match[1], int(match[2])) for match in map(ACCELERATE_FOLDER.fullmatch, folders) if match
    )
    if not found:
        raise CheckpointNotFoundError(
            f"{directory.location} has no folder pytorch_model_fsdp_0 or optimizer_0",
            directory.location,
        )
    for stem, number in found:
        name, folder = "model" if stem != "optimizer" else stem, f"{stem}_{number}"
        part = DcpLayout().open(open_below(folder))
        for key, spec in zip(part.names, part.table.keys, strict=True):
            if spec.path[0] != name or len(spec.path) < 2:
                raise FormatError(f"{folder} holds {key!r}, expected keys below {name!r}")
        prefix = (name if number == 0 else f"{name}_{number}",)
        building.take(part, prefix, folder, skip=1)
    return building.manifest()


def open_megatron_dist(directory: Directory) -> Manifest:
    """A checkpoint of Megatron-core's ``torch_dist``: its tensors, and what ``common.pt`` holds.

    Raises:
        FormatError: another backend has written it.
    """
    building = Building(directory, "megatron_dist")
    members = read_json(directory, "metadata.json", _MOST_JSON)
    if members.get("sharded_backend") != "torch_dist":
        raise FormatError(
            f"metadata.json names the backend {str(members.get('sharded_backend'))[:80]!r}; only"
            " torch_dist is read"
        )
    building.take(DcpLayout().open(directory))
    if directory.exists("common.pt"):
        with opened_tree(directory, "common.pt", MEGATRON_CLASSES) as tree:
            building.leaves(tree, tree.root, building.file("common.pt"), ())
    return building.manifest()
