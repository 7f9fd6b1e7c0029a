"""Memory that boxes of stored tensors are read into, and the reads of boxes stored row-major."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol, Self

import numpy as np
import torch

from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.memory import bytes_of, is_plain_memory

__all__ = ["Destination", "Sink", "cast_into", "dense_reads"]

_SLAB_BYTES = 2 << 20
_WITHOUT_INFINITY = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)


class Sink(Protocol):
    """What takes the elements of a box, in one part or in several.

    Attributes:
        dtype: of the stored elements.
        takes_bytes: whether the stored bytes of the whole box can be read straight into memory.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def takes_bytes(self) -> bool: ...

    def read_direct(self, offset: int, length: int) -> Read:
        """A range of a file that goes straight into the memory."""
        ...

    def read_through(self, offset: int, length: int, deliver: Callable[[memoryview], None]) -> Read:
        """A range of a file that ``deliver`` brings in."""
        ...

    def narrow(self, dimension: int, start: int, count: int) -> Self:
        """A part of it."""
        ...

    def fill(self, stored: torch.Tensor) -> None:
        """Take the elements of the whole box, whose memory is theirs during the call alone."""
        ...


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory that a box of a stored tensor is read into.

    Attributes:
        name: the stored key, for errors.
        dtype: of the stored elements.
        view: tensor of the box's shape.
        on_cast: called with the number of elements that did not fit, where ``view`` is of another
            dtype; ``None`` where it is of the same.
        keep: called with the name and the memory before that is overwritten.
    """

    name: str
    dtype: torch.dtype
    view: torch.Tensor
    on_cast: Callable[[int], None] | None = None
    keep: Callable[[str, torch.Tensor], None] | None = None

    @property
    def takes_bytes(self) -> bool:
        """Whether the stored bytes are what goes into the memory."""
        return self.on_cast is None and is_plain_memory(self.view)

    def read_direct(self, offset: int, length: int) -> Read:
        """A range of a file that goes straight into the memory."""
        return Read(offset, length, self.name, target=bytes_of(self.view), before=self._before())

    def read_through(self, offset: int, length: int, deliver: Callable[[memoryview], None]) -> Read:
        """A range of a file that ``deliver`` brings into the memory."""
        return Read(offset, length, self.name, deliver=deliver, before=self._before())

    def _before(self) -> Callable[[], None] | None:
        return None if self.keep is None else partial(self.keep, self.name, self.view)

    def narrow(self, dimension: int, start: int, count: int) -> Destination:
        """A part of it."""
        return replace(self, view=self.view.narrow(dimension, start, count))

    def fill(self, stored: torch.Tensor) -> None:
        """Copy elements of the stored dtype into the memory."""
        with torch.no_grad():
            if self.on_cast is not None:
                self.on_cast(cast_into(self.view, stored))
            elif self.dtype.itemsize == 1:
                # Not every one-byte dtype has a copy kernel; their bytes do.
                self.view.view(torch.uint8).copy_(stored.view(torch.uint8))
            else:
                self.view.copy_(stored)


def dense_reads(
    base: int,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
    extent: tuple[int, ...],
    destination: Sink,
) -> Iterator[Read]:
    """Reads for a box of a chunk whose elements are stored in row-major order."""
    dtype = destination.dtype
    strides = _strides(sizes)
    first = sum(a * b for a, b in zip(begin, strides, strict=True))
    last = first + sum((a - 1) * b for a, b in zip(extent, strides, strict=True))
    offset = base + first * dtype.itemsize
    length = (last - first + 1) * dtype.itemsize
    is_dense = last - first + 1 == prod(extent)
    if is_dense and destination.takes_bytes:
        yield destination.read_direct(offset, length)
        return
    dimension = next((d for d, count in enumerate(extent) if count > 1), None)
    if length <= _SLAB_BYTES or dimension is None:
        deliver = partial(_deliver, destination, extent, strides)
        yield destination.read_through(offset, length, deliver)
        return
    span = max(1, length // extent[dimension])
    step = max(1, min(_SLAB_BYTES // span, extent[dimension] - 1))
    for start in range(0, extent[dimension], step):
        count = min(step, extent[dimension] - start)
        yield from dense_reads(
            base,
            sizes,
            _changed(begin, dimension, begin[dimension] + start),
            _changed(extent, dimension, count),
            destination.narrow(dimension, start, count),
        )


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(sizes):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _changed(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _deliver(
    destination: Sink, extent: tuple[int, ...], strides: tuple[int, ...], data: memoryview
) -> None:
    """Copy a box out of the bytes that span it."""
    nbytes = destination.dtype.itemsize
    whole = data[: len(data) // nbytes * nbytes]
    if not data.readonly and ctypes.addressof(ctypes.c_char.from_buffer(data)) % nbytes == 0:
        elements = torch.frombuffer(whole, dtype=destination.dtype)
        destination.fill(elements.as_strided(extent, strides))
        return
    raw = np.frombuffer(data, f"V{nbytes}")
    steps = [stride * nbytes for stride in strides]
    dense = bytearray(np.lib.stride_tricks.as_strided(raw, extent, steps).tobytes())
    destination.fill(torch.frombuffer(dense, dtype=destination.dtype).view(extent))


def cast_into(view: torch.Tensor, stored: torch.Tensor) -> int:
    """Convert ``stored`` into ``view``; how many elements do not fit."""
    if stored.is_complex() and not view.is_complex():
        lost = int((torch.view_as_real(stored)[..., 1] != 0).sum())
        view.copy_(torch.view_as_real(stored)[..., 0])
        return lost
    view.copy_(stored)
    given = view.to(stored.device)
    if given.dtype in _WITHOUT_INFINITY:
        return _saturated(stored, given)
    if given.dtype.is_floating_point or given.is_complex():
        return int((_finite(stored) & ~_finite(given)).sum())
    if given.dtype is torch.bool:
        return int(((stored != 0) & (stored != 1)).sum())
    if not stored.dtype.is_floating_point:
        return int((given.to(torch.int64) != stored.to(torch.int64)).sum())
    limits = torch.iinfo(given.dtype)
    wide = stored.to(torch.float64)
    fits = wide.isfinite() & (wide > limits.min - 1.0) & (wide < limits.max + 1.0)
    return int((~fits).sum())


def _saturated(stored: torch.Tensor, given: torch.Tensor) -> int:
    """Elements that a dtype without infinity has replaced by its largest, or by no number."""
    wide = stored.to(torch.float64)
    limit = torch.finfo(given.dtype)
    outside = (wide.abs() > limit.max) | (given.to(torch.float64).isnan())
    if given.dtype is torch.float8_e8m0fnu:
        outside |= wide < 0
    return int((outside & ~wide.isnan()).sum())


def _finite(values: torch.Tensor) -> torch.Tensor:
    if not (values.dtype.is_floating_point or values.is_complex()):
        return torch.ones(values.shape, dtype=torch.bool, device="cpu")
    wide = values if values.is_complex() else values.to(torch.float64)
    return wide.isfinite()
