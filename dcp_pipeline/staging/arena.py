"""Snapshots in buffers that are kept from save to save."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from dcp_pipeline.core.garbage import collector_paused
from dcp_pipeline.staging.base import Stager
from dcp_pipeline.staging.copies import Copies
from dcp_pipeline.staging.memory import Buffer, Memory
from dcp_pipeline.types.entries import Entries, Entry, Piece, Snapshot

__all__ = ["ArenaSnapshot", "ArenaStager"]

_ALIGNMENT = 64
_PAGE = 4096

Form = tuple[torch.dtype, torch.Size]


class ArenaSnapshot(Snapshot):
    """A snapshot in one buffer.

    Attributes:
        arena: where it lies.
        positions: of each copied piece in the buffer, in the order of entries and pieces.
        sources: what is copied, kept until it is.
    """

    arena: _Arena
    positions: list[int]
    sources: list[torch.Tensor]
    events: list[Any]

    def wait(self) -> None:
        for event in self.events:
            event.synchronize()
        self.events, self.sources = [], []


class _Arena:
    """A buffer, and the tensors over it of the last snapshot: the next one mostly looks alike.

    Attributes:
        tensors: one for each piece, one after another.
        targets: the same memory, of dtypes that can be copied.
        positions: of each in the buffer, in bytes.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._forms: list[Form] = []
        self.tensors: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []
        self.positions: list[int] = []

    @property
    def nbytes(self) -> int:
        return self.buffer.data.numel()

    def lay_out(self, forms: list[Form]) -> None:
        """Place tensors of these dtypes and shapes one after another."""
        if forms == self._forms:
            return
        self.tensors, self.positions, position = [], [], 0
        for dtype, shape in forms:
            nbytes = dtype.itemsize * shape.numel()
            run = self.buffer.data[position : position + nbytes]
            self.tensors.append(run.view(dtype).view(shape))
            self.positions.append(position)
            position += _aligned(nbytes)
        self.targets = [_copyable(tensor) for tensor in self.tensors]
        self._forms = forms

    def forget(self) -> None:
        """Let go of the tensors over the buffer."""
        self._forms, self.tensors, self.targets, self.positions = [], [], [], []


class ArenaStager(Stager):
    """Copies every piece into one buffer, which later saves reuse.

    Memory that was touched before takes copies several times faster than fresh memory. A snapshot
    keeps its buffer until it is released; there are as many buffers as snapshots at a time.

    Args:
        memory: what buffers are made of.
        copies: how they are filled.
    """

    is_snapshot: ClassVar[bool] = True

    def __init__(self, memory: Memory, copies: Copies | None = None) -> None:
        self._memory = memory
        self._copies = copies or Copies()
        self._lock = threading.Lock()
        self._free: list[_Arena] = []
        self._used: list[_Arena] = []
        self._is_closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that the kept buffers hold."""
        with self._lock:
            return sum(arena.nbytes for arena in (*self._free, *self._used))

    def numbers(self) -> set[int]:
        """Of the buffers that are there."""
        with self._lock:
            return {arena.buffer.number for arena in (*self._free, *self._used)}

    @collector_paused()
    def stage(self, entries: Entries) -> ArenaSnapshot:
        pieces = [piece for entry in entries if entry.alias < 0 for piece in entry.pieces]
        sources = [_copyable(piece.data) for piece in pieces]
        forms = [(piece.data.dtype, piece.data.shape) for piece in pieces]
        needed = sum(_aligned(dtype.itemsize * shape.numel()) for dtype, shape in forms)
        arena = self._acquire(needed)
        try:
            arena.lay_out(forms)
            snapshot = ArenaSnapshot()
            snapshot.arena, snapshot.positions = arena, arena.positions
            snapshot.sources = sources
            snapshot.events = self._copies.start(arena.targets, sources)
        except BaseException:
            self._release(arena)
            raise
        tensors = iter(arena.tensors)
        for entry in entries:
            if entry.alias >= 0:
                copied = snapshot[entry.alias].pieces
            else:
                copied = tuple(
                    [Piece(piece.offsets, piece.sizes, next(tensors)) for piece in entry.pieces]
                )
            snapshot.append(_with(entry, copied))
        return snapshot

    def release(self, staged: Entries) -> None:
        if isinstance(staged, ArenaSnapshot):
            staged.wait()
            # Whoever still holds the snapshot, such as the frames of an error, holds no memory.
            staged.clear()
            self._release(staged.arena)

    def reserve_for(self, entries: Entries, count: int = 1) -> None:
        """Have ``count`` buffers for snapshots of ``entries`` ready, every page touched."""
        needed = sum(
            _aligned(piece.data.numel() * piece.data.element_size())
            for entry in entries
            if entry.alias < 0
            for piece in entry.pieces
        )
        arenas = [self._acquire(needed) for _ in range(count)]
        for arena in arenas:
            arena.buffer.data[::_PAGE] = 0
            self._release(arena)

    def _acquire(self, nbytes: int) -> _Arena:
        with self._lock:
            self._is_closed = False
            self._free.sort(key=lambda arena: arena.nbytes)
            fitting = [arena for arena in self._free if arena.nbytes >= nbytes]
            # One that is too small is replaced: the state has grown, and will not shrink again.
            chosen = fitting[0] if fitting else self._free[0] if self._free else None
            if chosen is not None:
                self._free.remove(chosen)
        if chosen is None or chosen.nbytes < nbytes:
            if chosen is not None:
                self._give_back(chosen)
            chosen = _Arena(self._memory.allocate(max(nbytes, 1)))
        with self._lock:
            self._used.append(chosen)
        return chosen

    def _release(self, arena: _Arena) -> None:
        with self._lock:
            if arena not in self._used:
                return
            self._used.remove(arena)
            if not self._is_closed:
                self._free.append(arena)
                return
        self._give_back(arena)

    def _give_back(self, arena: _Arena) -> None:
        arena.forget()
        self._memory.free(arena.buffer)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            given_back, self._free = self._free, []
        for arena in given_back:
            self._give_back(arena)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _copyable(data: torch.Tensor) -> torch.Tensor:
    # Not every one-byte dtype has a copy kernel; their bytes do.
    return data.view(torch.uint8) if data.element_size() == 1 else data


def _with(entry: Entry, pieces: tuple[Piece, ...]) -> Entry:
    return Entry(
        entry.path,
        entry.kind,
        entry.dtype,
        entry.shape,
        pieces,
        entry.payload,
        entry.may_repeat,
        entry.digest,
        entry.alias,
    )
