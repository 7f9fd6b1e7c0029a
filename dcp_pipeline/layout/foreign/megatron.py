"""Kind ``megatron``: Megatron-LM's older format, a file of ``torch.save`` per model-parallel rank.

``latest_checkpointed_iteration.txt`` names an iteration (or ``release``); its folder
``iter_{N:07}`` has ``mp_rank_{tp:02}`` or, with pipeline parallelism, ``mp_rank_{tp:02}_{pp:03}``,
each with ``model_optim_rng.pt``. Source: ``megatron/training/checkpointing.py``.
"""

from __future__ import annotations

import re
from typing import Final

from dcp_pipeline.core.errors import CheckpointNotFoundError, FormatError, MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.foreign.building import Building, opened_tree
from dcp_pipeline.layout.foreign.dcp_inside import MEGATRON_CLASSES
from dcp_pipeline.storage.base import Directory

__all__ = ["LATEST", "RANK_FOLDER", "iteration_folder", "open_megatron"]

LATEST: Final = "latest_checkpointed_iteration.txt"
RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,6})(?:_(\d{3,6}))?")

_FILES: Final = ("model_optim_rng.pt", "model_rng.pt")


def iteration_folder(text: bytes) -> str:
    """The folder that the text of the file ``latest_checkpointed_iteration.txt`` stands for.

    >>> iteration_folder(b"1200\\n")
    'iter_0001200'
    """
    word = text.strip()
    if word == b"release":
        return "release"
    if not word.isdigit() or len(word) > 18:
        raise FormatError(f"{LATEST} holds {text[:40]!r}, expected the number of an iteration")
    return f"iter_{int(word):07}"


def open_megatron(directory: Directory, folders: list[str]) -> Manifest:
    """The files of all ranks of an iteration; keys begin with ``tp{t}.pp{p}.``.

    Args:
        directory: of the iteration.
        folders: that lie in it.

    Raises:
        MissingFileError: the files of a rank between others are lacking.
    """
    building = Building(directory, "megatron")
    ranks: dict[tuple[int, int], str] = {}
    for folder in folders:
        match = RANK_FOLDER.fullmatch(folder)
        if match:
            place = (int(match[1]), int(match[2] or 0))
            if place in ranks:
                raise FormatError(f"{folder} and {ranks[place]} are of the same rank")
            ranks[place] = folder
    if not ranks:
        raise CheckpointNotFoundError(
            f"{directory.location} has no folder mp_rank_##", directory.location
        )
    wide, deep = (max(place[axis] for place in ranks) + 1 for axis in (0, 1))
    if len(ranks) != wide * deep:
        raise MissingFileError(
            f"{directory.location} has {len(ranks)} folders mp_rank_*, of {wide} tensor-parallel"
            f" and {deep} pipeline ranks there are {wide * deep}",
            directory.location,
        )
    for (tp, pp), folder in sorted(ranks.items()):
        name = next(
            (f"{folder}/{one}" for one in _FILES if directory.exists(f"{folder}/{one}")), ""
        )
        if not name:
            raise MissingFileError(f"{folder} has no {_FILES[0]}", f"{folder}/{_FILES[0]}")
        with opened_tree(directory, name, MEGATRON_CLASSES) as tree:
            building.leaves(tree, tree.root, building.file(name), (f"tp{tp}", f"pp{pp}"))
    return building.manifest()
