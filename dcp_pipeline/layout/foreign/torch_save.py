"""Kind ``torch_save``: one file that ``torch.save`` wrote, of whatever nesting, weights only."""

from __future__ import annotations

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.foreign.building import Building, opened_tree
from dcp_pipeline.storage.base import Directory

__all__ = ["open_torch_save"]


def open_torch_save(directory: Directory, name: str) -> Manifest:
    """What the file ``name`` holds; a root that is no mapping is called ``value``.

    Raises:
        FormatError, UnsafeCheckpointError: it is damaged, of the format before torch 1.6, or names
            a class: nothing is imported.
    """
    building = Building(directory, "torch_save")
    with opened_tree(directory, name) as tree:
        building.leaves(tree, tree.root, building.file(name), ())
    return building.manifest()
