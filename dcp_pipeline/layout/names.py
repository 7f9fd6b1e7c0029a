"""The file names of layout ``dcp``, and what any save leaves before its commit; torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "MANIFEST",
    "METADATA",
    "data_name",
    "is_data",
    "is_plain_dcp_data",
    "marker_name",
    "marker_save_id",
    "metadata_ranks",
    "rank_metadata_name",
    "save_of",
    "sums_name",
]

MANIFEST: Final = "manifest.json"
METADATA: Final = ".metadata"

_OURS = re.compile(
    r"__\d+_\d+\.([0-9a-f]{8})\.(?:distcp|safetensors|mega)"
    r"|__\d+\.([0-9a-f]{8})\.sums"
    r"|\.saving-([0-9a-f]{8})[0-9a-f]{24}\.json(?:\.[0-9a-f]{8}\.tmp)?"
    r"|\..+\.([0-9a-f]{8})\.part"
)
_PLAIN_DCP = re.compile(r"__\d+_\d+\.distcp")
_RANK_METADATA = re.compile(r"__(0|[1-9]\d{0,8})\.metadata")
_MARKER = re.compile(r"\.saving-([0-9a-f]{32})\.json")


def data_name(rank: int, number: int, save_id: str, extension: str) -> str:
    """The ``number``-th data file of ``rank``."""
    return f"__{rank}_{number}.{save_id[:8]}{extension}"


def sums_name(rank: int, save_id: str) -> str:
    """The digests of the data files of ``rank``."""
    return f"__{rank}.{save_id[:8]}.sums"


def marker_name(save_id: str) -> str:
    """Says that a save is under way."""
    return f".saving-{save_id}.json"


def marker_save_id(name: str) -> str | None:
    """The save id in a marker's name, ``None`` for other files."""
    match = _MARKER.fullmatch(name)
    return match[1] if match else None


def rank_metadata_name(rank: int) -> str:
    """What plain DCP writes on each rank, not ``.metadata``, with ``use_collectives=False``."""
    return f"__{rank}{METADATA}"


def metadata_ranks(found: Iterable[str]) -> list[int]:
    """The ranks that have left their own metadata among the files ``found``, sorted."""
    matches = map(_RANK_METADATA.fullmatch, found)
    return sorted(int(match[1]) for match in matches if match)


def save_of(name: str) -> str | None:
    """The first eight digits of the save id in one of our names, ``None`` for other files."""
    match = _OURS.fullmatch(name)
    return next(group for group in match.groups() if group) if match else None


def is_plain_dcp_data(name: str) -> bool:
    """Whether plain DCP names its data files so."""
    return _PLAIN_DCP.fullmatch(name) is not None


def is_data(name: str) -> bool:
    """Whether a file of this name is data of some checkpoint."""
    return is_plain_dcp_data(name) or save_of(name) is not None
