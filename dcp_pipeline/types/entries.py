"""The state of one rank on its way through the save: entries, their pieces, and what is written.

There may be tens of thousands of them while training waits. They are never changed; that they
could be spares the check that a frozen dataclass makes for each field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dcp_pipeline.core.path import Path
from dcp_pipeline.core.table import KeySpec, Kind

__all__ = ["Entries", "Entry", "Item", "Piece", "Snapshot"]


@dataclass(slots=True)
class Piece:
    """A box of the global tensor and this rank's memory of it.

    Attributes:
        offsets, sizes: the box, one number per dimension.
        data: local view of shape ``sizes``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: torch.Tensor


@dataclass(slots=True)
class Entry:
    """One key of this rank's state.

    Attributes:
        path: where it lies in the state.
        kind: what it is there.
        dtype: name of the element type, ``None`` for a value.
        shape: global shape, ``()`` for a value.
        pieces: the boxes that this rank holds; empty for a value.
        payload: a value's stored bytes.
        may_repeat: whether other ranks may hold the same boxes.
        digest: of a value's meaning, to compare it between ranks; 0 where it has none.
        alias: index of the earlier entry whose memory this one shares, or -1.
    """

    path: Path
    kind: Kind
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    pieces: tuple[Piece, ...] = ()
    payload: bytes = b""
    may_repeat: bool = True
    digest: int = 0
    alias: int = -1

    @property
    def spec(self) -> KeySpec:
        """The entry as a key of a :class:`ChunkTable`."""
        return KeySpec(self.path, self.kind, self.dtype, self.shape, self.alias)


@dataclass(slots=True)
class Item:
    """What is written as one unit of a data file: a box of a tensor, or a value's bytes.

    Attributes:
        name: the key's stored name.
        offsets, sizes: the box; empty for a value.
        shape: the key's global shape.
        dtype: name of the element type, ``None`` for a value.
        data: tensor of shape ``sizes``, or the bytes.
        digest: of a value's meaning, 0 where it was not taken.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str | None
    data: torch.Tensor | bytes
    digest: int = 0


class Entries(list[Entry]):
    """The entries of one rank's state, in the order of the state."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the distinct memory behind the entries."""
        return sum(
            len(entry.payload) + sum(p.data.numel() * p.data.element_size() for p in entry.pieces)
            for entry in self
            if entry.alias < 0
        )

    def wait(self) -> None:
        """Until the memory behind the entries holds their values; copies may be under way."""
        return None

    def keeping(self, wanted: Sequence[bool]) -> Entries:
        """The entries that are wanted; an alias of one that is not becomes its own."""
        place: dict[int, int] = {}
        kept = Entries()
        for position, (entry, is_wanted) in enumerate(zip(self, wanted, strict=True)):
            if not is_wanted:
                continue
            source = position if entry.alias < 0 else entry.alias
            alias = place.setdefault(source, len(kept))
            kept.append(replace(entry, alias=-1 if alias == len(kept) else alias))
        return kept


class Snapshot(Entries):
    """Entries over memory that they were copied into."""

    @property
    def nbytes(self) -> int:
        """Bytes that were copied."""
        return self.total_bytes
