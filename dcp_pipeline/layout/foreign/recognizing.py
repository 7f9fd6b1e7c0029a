"""What kind of checkpoint lies somewhere, told by the names of its files alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from dcp_pipeline.core.errors import CheckpointNotFoundError, FormatError, list_some
from dcp_pipeline.layout import names
from dcp_pipeline.layout.foreign.dcp_inside import ACCELERATE_FOLDER
from dcp_pipeline.layout.foreign.deepspeed import OPTIM_STATES
from dcp_pipeline.layout.foreign.deepspeed_universal import LATEST_UNIVERSAL
from dcp_pipeline.layout.foreign.megatron import LATEST, RANK_FOLDER
from dcp_pipeline.layout.foreign.places import Place
from dcp_pipeline.layout.foreign.torchsnapshot import SNAPSHOT_METADATA

__all__ = ["DCP_RECORDS", "STEP_FOLDER", "TORCH_FILE", "recognized"]

DCP_RECORDS: Final = (names.MANIFEST, names.METADATA)
STEP_FOLDER: Final = re.compile(r"step-(0|[1-9]\d{0,17})")
TORCH_FILE: Final = re.compile(r"(?s:.+)\.(pt|pth|bin|ckpt)")

_SAFETENSORS: Final = re.compile(r"(?s:.+)\.safetensors(\.index\.json)?")
_MEGA: Final = re.compile(r"(?s:.+)\.mega(\.index\.json)?")
_HF_BIN: Final = re.compile(r"(pytorch|adapter)_model\.bin(\.index\.json)?")


def _is_dcp(place: Place) -> bool:
    return place.has(*DCP_RECORDS) or bool(names.metadata_ranks(place.names))


_KINDS: Final[dict[str, tuple[str, Callable[[Place], bool]]]] = {
    "torchsnapshot": (SNAPSHOT_METADATA, lambda at: at.has(SNAPSHOT_METADATA)),
    "megatron_dist": (
        "metadata.json beside .metadata or common.pt",
        lambda at: at.has("metadata.json") and at.has(names.METADATA, "common.pt"),
    ),
    "dcp": ("manifest.json, .metadata, __{rank}.metadata", _is_dcp),
    "accelerate": (
        "folders pytorch_model_fsdp_0, optimizer_0",
        lambda at: bool(at.matching(ACCELERATE_FOLDER, among_folders=True)),
    ),
    "megatron": (
        f"{LATEST}, folders mp_rank_##",
        lambda at: at.has(LATEST) or bool(at.matching(RANK_FOLDER, among_folders=True)),
    ),
    "deepspeed_universal": (
        f"{LATEST_UNIVERSAL}, a folder zero",
        lambda at: at.has(LATEST_UNIVERSAL) or "zero" in at.folders,
    ),
    "deepspeed": (
        "latest, *_optim_states.pt",
        lambda at: at.has("latest") or bool(at.matching(OPTIM_STATES)),
    ),
    "torchtitan": (
        "folders step-{N}",
        lambda at: bool(at.matching(STEP_FOLDER, among_folders=True)),
    ),
    "mega": ("*.mega", lambda at: bool(at.matching(_MEGA))),
    "huggingface": (
        "*.safetensors, pytorch_model.bin",
        lambda at: (
            bool(at.matching(_SAFETENSORS) or at.matching(_HF_BIN)) or "sharded" in at.folders
        ),
    ),
    "torch_save": ("a single *.pt, *.pth or *.bin", lambda at: bool(at.matching(TORCH_FILE))),
}
"""Kinds in the order in which they are tried: what is looked for, and whether it is there."""


def recognized(place: Place) -> str:
    """The kind of what lies at a place.

    Raises:
        CheckpointNotFoundError: nothing is there, or nothing that is known.
        FormatError: several files of which each could be meant.
    """
    if place.file is not None:
        return _of_file(place.file, place.location)
    for kind, (_, is_there) in _KINDS.items():
        if is_there(place):
            if kind == "torch_save" and len(place.matching(TORCH_FILE)) > 1:
                found = list_some(place.matching(TORCH_FILE), 5)
                raise FormatError(f"{place.location} holds {found}: name the one that you mean")
            return kind
    what = "no checkpoint that is known" if place.names or place.folders else "nothing there"
    looked = "; ".join(f"{kind}: {signs}" for kind, (signs, _) in _KINDS.items())
    raise CheckpointNotFoundError(f"{place.location}: {what}. Looked for {looked}", place.location)


def _of_file(name: str, location: str) -> str:
    if name.endswith(".safetensors"):
        return "huggingface"
    if name.endswith(".mega"):
        return "mega"
    if TORCH_FILE.fullmatch(name):
        return "torch_save"
    raise CheckpointNotFoundError(
        f"{location}/{name} is no file that is known by its name: *.safetensors, *.mega, *.pt,"
        " *.pth, *.bin, *.ckpt",
        name,
    )
