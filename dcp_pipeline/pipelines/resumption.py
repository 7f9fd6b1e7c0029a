"""What an interrupted conversion has written already, so that it can be taken up again.

A rank notes each unit of its work once that is durable: a batch of boxes of shared files, or one of
its own data files. The notes bear the name of a temporary file of the save's marker, so that
whoever removes what dead saves have left removes them too.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dcp_pipeline.core.crc64 import Words
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.layout.names import marker_name
from dcp_pipeline.storage.base import Directory

__all__ = [
    "UNIT_BYTES",
    "Resumption",
    "batches",
    "lasting_id",
    "words_as_text",
    "words_of_text",
]

UNIT_BYTES = 1 << 30
"""Bytes of a unit: so much is written again at most, by each thread."""

_SMALLEST_BYTES = 16 << 20


def lasting_id(*facts: object) -> str:
    """An id of 32 hexadecimal digits that a save has again when it is tried again."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Resumption:
    """The notes of one rank.

    Args:
        directory: of the target.
        save_id: of the conversion, the same each time it is tried.
        rank: of this process.
    """

    def __init__(self, directory: Directory, save_id: str, rank: int) -> None:
        self._directory = directory
        self._name = f"{marker_name(save_id)}.{rank:08x}.tmp"
        self._lock = threading.Lock()
        self._done: dict[str, Any] = {}
        # Notes that cannot be read are none: the work is done again.
        with contextlib.suppress(CheckpointError, ValueError, AttributeError):
            self._done = dict(json.loads(directory.read(self._name)))

    def found(self, unit: str) -> Any:
        """What was noted of a unit, ``None`` where it was not finished."""
        return self._done.get(unit)

    def note(self, unit: str, fact: Any) -> None:
        """A unit is durable."""
        with self._lock:
            self._done[unit] = fact
            self._directory.put_whole(self._name, json.dumps(self._done).encode())

    def forget(self) -> None:
        """The conversion is finished, or is to begin anew."""
        self._done.clear()
        self._directory.delete([self._name])


def batches(nbytes: Sequence[int], threads: int) -> list[slice]:
    """Runs of items of at most about a unit's bytes each, and one for each thread where they do."""
    unit = min(UNIT_BYTES, max(_SMALLEST_BYTES, sum(nbytes) // threads))
    cuts, filled = [0], 0
    for number, count in enumerate(nbytes):
        if filled and filled + count > unit:
            cuts.append(number)
            filled = 0
        filled += count
    cuts.append(len(nbytes))
    return [slice(a, b) for a, b in pairwise(cuts) if a < b]


def words_as_text(words: Words) -> str:
    """Words of 64 bits as text."""
    return base64.b64encode(words.astype("<u8").tobytes()).decode("ascii")


def words_of_text(text: str) -> Words:
    """The inverse of :func:`words_as_text`."""
    return np.frombuffer(base64.b64decode(text), "<u8").astype(np.uint64)
