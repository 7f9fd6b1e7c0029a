"""A snapshot in host memory that is kept from save to save."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from dcp_pipeline.staging.base import Stager
from dcp_pipeline.types.entries import Entries, Piece, Snapshot

__all__ = ["HostStager"]

_ALIGNMENT = 64


class HostStager(Stager):
    """Copies every piece into one buffer, which later saves of the same size reuse.

    Memory that was touched before takes copies several times faster than fresh memory.
    """

    is_snapshot: ClassVar[bool] = True

    def __init__(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes that the kept buffer holds."""
        return self._arena.numel()

    def stage(self, entries: Entries) -> Entries:
        self._reserve(sum(_room(piece) for e in entries if e.alias < 0 for piece in e.pieces))
        staged = Snapshot()
        position = 0
        for entry in entries:
            if entry.alias >= 0:
                staged.append(replace(entry, pieces=staged[entry.alias].pieces))
                continue
            pieces = []
            for piece in entry.pieces:
                pieces.append(self._copy(piece, position))
                position += _room(piece)
            staged.append(replace(entry, pieces=tuple(pieces)))
        _wait_for_devices(entries)
        return staged

    def _reserve(self, nbytes: int) -> None:
        if self._arena.numel() < nbytes:
            self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._arena = torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _copy(self, piece: Piece, position: int) -> Piece:
        source = piece.data
        nbytes = source.numel() * source.element_size()
        target = self._arena[position : position + nbytes].view(source.dtype).view(source.shape)
        if source.element_size() == 1:
            # Not every one-byte dtype has a copy kernel; their bytes do.
            target.view(torch.uint8).copy_(source.view(torch.uint8), non_blocking=True)
        else:
            target.copy_(source, non_blocking=True)
        return replace(piece, data=target)

    def close(self) -> None:
        self._arena = torch.empty(0, dtype=torch.uint8, device="cpu")


def _room(piece: Piece) -> int:
    nbytes = piece.data.numel() * piece.data.element_size()
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _wait_for_devices(entries: Entries) -> None:
    devices = {piece.data.device for entry in entries for piece in entry.pieces}
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
