"""Kind ``deepspeed_universal``: a folder per parameter and a file per state of it.

``latest_universal`` names a folder; in it ``zero/{parameter}/`` has ``fp32.pt``, ``step.pt`` and
one file for each other state of the optimizer. A state is a tensor, or a mapping whose ``param``
is the tensor. Source: ``deepspeed/checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

from typing import Any, Final

from dcp_pipeline.core.errors import CheckpointNotFoundError, FormatError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.formats.torch_tree import TorchTree
from dcp_pipeline.formats.torch_zip import Rebuilt
from dcp_pipeline.layout.foreign.building import Building, opened_tree
from dcp_pipeline.storage.base import Directory

__all__ = ["LATEST_UNIVERSAL", "open_deepspeed_universal"]

LATEST_UNIVERSAL: Final = "latest_universal"


def open_deepspeed_universal(directory: Directory, parameters: list[str]) -> Manifest:
    """Weights as ``model.{parameter}``, states as ``optimizer.state.{parameter}.{state}``.

    Args:
        directory: with the folder ``zero``.
        parameters: names of the folders in that.

    Raises:
        CheckpointNotFoundError: there are none.
    """
    building = Building(directory, "deepspeed_universal")
    if not parameters:
        raise CheckpointNotFoundError(
            f"{directory.location} has no folder zero/ with parameters", directory.location
        )
    for parameter in parameters:
        files = [
            name for name in directory.names_below(f"zero/{parameter}") if name.endswith(".pt")
        ]
        if f"zero/{parameter}/fp32.pt" not in files:
            raise FormatError(f"zero/{parameter} has no fp32.pt")
        for name in files:
            state = name.rpartition("/")[2].removesuffix(".pt")
            path: Path = ("optimizer", "state", parameter, state)
            with opened_tree(directory, name) as tree:
                part = _content(tree)
                is_weight = state == "fp32"
                if is_weight and type(part) is not Rebuilt:
                    raise FormatError(f"it holds a {type(part).__name__}, expected a tensor")
                where = ("model", parameter) if is_weight else path
                building.leaves(tree, part, building.file(name), where)
    return building.manifest()


def _content(tree: TorchTree) -> Any:
    root = tree.root
    return root["param"] if isinstance(root, dict) and "param" in root else root
