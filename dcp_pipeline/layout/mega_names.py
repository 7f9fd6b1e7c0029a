"""The file names of a MEGA repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from dcp_pipeline.core.errors import CorruptCheckpointError, list_some

__all__ = ["INDEX", "SINGLE", "is_shard", "shard_name", "whole_files"]

SINGLE: Final = "model.mega"
INDEX: Final = "model.mega.index.json"
EXTENSION: Final = ".mega"
_SHARD: Final = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.mega")


def shard_name(number: int, count: int, stem: str = "model") -> str:
    """The name of a shard, numbered from 0.

    >>> shard_name(0, 1), shard_name(2, 4)
    ('model.mega', 'model-00003-of-00004.mega')
    """
    if count == 1:
        return SINGLE
    return f"{stem}-{number + 1:05d}-of-{count:05d}{EXTENSION}"


def is_shard(name: str) -> bool:
    """Whether a file is named as a shard."""
    return _SHARD.fullmatch(name) is not None


def whole_files(found: Iterable[str], location: str) -> list[str]:
    """The files of a repository without an index and ``model.mega``; empty where there are none.

    Raises:
        CorruptCheckpointError: shards are missing, or there are several models.
    """
    files = sorted(name for name in found if name.endswith(EXTENSION))
    if len(files) <= 1 and not any(map(_SHARD.fullmatch, files)):
        return files
    shards = [_SHARD.fullmatch(name) for name in files]
    first = shards[0]
    if first is None or any(s is None or s.group(1, 3) != first.group(1, 3) for s in shards):
        raise CorruptCheckpointError(
            f"{location} has no {INDEX}, and its files are not the shards of one model:"
            f" {list_some(files, 5)}"
        )
    if sorted(int(s[2]) for s in shards if s) != list(range(1, int(first[3]) + 1)):
        raise CorruptCheckpointError(
            f"{location} has {len(files)} of the {int(first[3])} shards of {first[1]!r}:"
            f" {list_some(files, 5)}"
        )
    return files
