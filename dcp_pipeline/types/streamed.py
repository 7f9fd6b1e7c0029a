"""What stands for a tensor whose elements are made while they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch

from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.memory import bytes_of

__all__ = ["Fill", "Streamed"]

Fill = Callable[[tuple[int, ...], torch.Tensor], None]
"""Fills memory with the elements of the box that starts at an index, and has the memory's shape."""


class Streamed:
    """A box of a tensor, of which only some elements are in memory at a time.

    It has as much of a tensor's interface as what writes items asks for.

    Args:
        fill: makes the elements.
        dtype: name of the element type.
        offsets, sizes: the box.
        slab_bytes: that are made at a time, unless a single row has more.
        buffer: gives memory of some bytes, which stays this thread's until it is asked again.
    """

    def __init__(
        self,
        fill: Fill,
        dtype: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        slab_bytes: int,
        buffer: Callable[[int], torch.Tensor],
    ) -> None:
        self._fill, self._offsets = fill, tuple(offsets)
        self._slab_bytes, self._buffer = slab_bytes, buffer
        self._name = dtype
        self.dtype = DTYPES[dtype]
        self.shape = torch.Size(sizes)

    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Bytes of one."""
        return self.dtype.itemsize

    def narrow(self, dimension: int, start: int, length: int) -> Streamed:
        """A part of it."""
        offsets, sizes = list(self._offsets), list(self.shape)
        offsets[dimension] += start
        sizes[dimension] = length
        return Streamed(self._fill, self._name, offsets, sizes, self._slab_bytes, self._buffer)

    def segments(self) -> Iterator[memoryview]:
        """Its bytes in row-major order; each view is valid until the next is asked for."""
        yield from self._slabs(self._offsets, tuple(self.shape), 0)

    def _slabs(
        self, offsets: tuple[int, ...], sizes: tuple[int, ...], axis: int
    ) -> Iterator[memoryview]:
        nbytes = prod(sizes) * self.element_size()
        if not nbytes:
            return
        if nbytes <= self._slab_bytes or axis == len(sizes):
            memory = self._buffer(nbytes)[:nbytes].view(self.dtype).view(sizes)
            self._fill(offsets, memory)
            yield bytes_of(memory)
            return
        step = max(1, sizes[axis] * self._slab_bytes // nbytes)
        for start in range(0, sizes[axis], step):
            count = min(step, sizes[axis] - start)
            begin = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
            extent = (*sizes[:axis], count, *sizes[axis + 1 :])
            yield from self._slabs(begin, extent, axis + (count == 1))
