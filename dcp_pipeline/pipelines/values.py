"""What the nodes of the save hand to one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from dcp_pipeline.core.manifest import FileEntry, SumsEntry
from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.spans import SpansByRow
from dcp_pipeline.layout.export import PlannedFile
from dcp_pipeline.planning.base import GlobalPlan

__all__ = ["CoordinatorPlan", "Receipt", "Share"]


@dataclass(frozen=True)
class Places:
    """Where the chunks of a share go, in files that were planned for all ranks.

    Attributes:
        files: name and size in bytes of each.
        file: ``[n]`` number of the file of each chunk.
        start: ``[n]`` where the elements of the chunk's whole tensor start in it, bytes.
    """

    files: tuple[tuple[str, int], ...]
    file: Column
    start: Column


@dataclass(frozen=True)
class Share:
    """What one rank writes.

    Attributes:
        names: stored name of each key of this rank's local plan.
        row: ``[n]`` row of the local plan that each chunk is a part of.
        offsets, sizes: ``[n, d]`` the chunk in the global tensor.
        total_bytes: of all chunks.
        places: in files that ranks share; ``None`` where each rank makes its own.
    """

    names: tuple[str, ...]
    row: Column
    offsets: Column
    sizes: Column
    total_bytes: int
    places: Places | None = None


@dataclass(frozen=True)
class Receipt:
    """What one rank has written, chunk by chunk as in its share.

    Attributes:
        files: data files, in the order that ``file`` counts them.
        sums: the file with their digests, ``None`` for a rank without files.
        file, offset, length, payload: ``[n]`` as in a :class:`ChunkTable`.
        nbytes: bytes of all files.
        seconds: what writing them took.
        fingerprint: ``[n]`` uint64 what each chunk adds to the fingerprint of its key, as
            :func:`dcp_pipeline.core.contributions.fingerprints_of` takes it; ``None`` where it was
            not taken.
        encoded: chunks whose bytes are not simply their elements, and how they are stored.
    """

    files: tuple[FileEntry, ...]
    sums: SumsEntry | None
    file: Column
    offset: Column
    length: Column
    payload: Column
    nbytes: int
    seconds: float = 0.0
    fingerprint: np.ndarray[tuple[int, ...], np.dtype[np.uint64]] | None = None
    encoded: SpansByRow = field(default_factory=dict)


@dataclass(frozen=True)
class CoordinatorPlan:
    """What only the coordinator keeps between ``agree`` and ``commit``.

    Attributes:
        plan: what all ranks write; ``None`` where DCP's planner keeps it.
        empty: containers that held nothing on any rank.
        record: the commit record that this save replaces, ``None`` where there is none.
        superseded: digest of DCP's ``.metadata`` that this save replaces.
        replaced: plain DCP's data files that this save replaces.
        tokens: of the files that say what is committed, where the layout is one of others.
        files: that the ranks share.
    """

    plan: GlobalPlan | None
    empty: tuple[tuple[Path, str], ...]
    record: bytes | None
    superseded: str | None
    replaced: frozenset[str]
    tokens: Mapping[str, str | None] = field(default_factory=dict)
    files: tuple[PlannedFile, ...] = ()
