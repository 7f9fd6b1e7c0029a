"""How the elements of two tensors differ, counted while they are read box by box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = ["Tally"]

_STEP_ELEMENTS = 1 << 20
"""That are compared at a time as wide numbers: some 50 MiB of them altogether."""

_PACKED = torch.float4_e2m1fn_x2

Array = np.ndarray[Any, Any]


class Tally:
    """What is different between two tensors of one shape.

    Without a tolerance elements of one dtype are alike if their bits are. With one, and between two
    dtypes, they are alike if ``|a - b| <= atol + rtol * |b|``, if both are not a number, or if both
    are the same infinity.

    Args:
        rtol, atol: relative and absolute tolerance.

    Attributes:
        elements: compared so far.
        different: of these.
        max_abs, max_rel: of those that differ: ``|a - b|``, and that over ``|b|``; infinite where
            one is no number or infinite; ``None`` for packed 4-bit numbers.
        first: index of the first that differs; the values there are in ``values``.
    """

    def __init__(self, rtol: float = 0.0, atol: float = 0.0) -> None:
        self._rtol, self._atol = rtol, atol
        self._is_exact = rtol == atol == 0
        self.elements = self.different = 0
        self.max_abs: float | None = 0.0
        self.max_rel: float | None = 0.0
        self.first: tuple[int, ...] | None = None
        self.values: tuple[str, str] = ("", "")

    def add(self, offsets: Sequence[int], a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare a box that starts at ``offsets``; boxes come in row-major order.

        Args:
            a, b: contiguous, on the host, of one shape.
        """
        self.elements += a.numel()
        if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
            return
        shape, flat_a, flat_b = tuple(a.shape), a.reshape(-1), b.reshape(-1)
        for start in range(0, a.numel(), _STEP_ELEMENTS):
            part = slice(start, start + _STEP_ELEMENTS)
            index = partial(_index, offsets, shape, start)
            self._compare(flat_a[part], flat_b[part], index)

    def _compare(
        self, a: torch.Tensor, b: torch.Tensor, index: Callable[[int], tuple[int, ...]]
    ) -> None:
        is_same_bits = _same_bits(a, b) if a.dtype == b.dtype else None
        if _PACKED in (a.dtype, b.dtype):
            differs = ~is_same_bits if is_same_bits is not None else np.ones(a.numel(), bool)
            self.max_abs = self.max_rel = None
            self._count(differs, a, b, index)
            return
        wide_a, wide_b = _wide(a), _wide(b)
        distance = _distance(wide_a, wide_b)
        size = np.abs(wide_b.astype(np.complex128 if wide_b.dtype.kind == "c" else np.float64))
        if self._is_exact and is_same_bits is not None:
            differs = ~is_same_bits
        else:
            limit = self._atol + (self._rtol * size if self._rtol else 0.0)
            # An infinity is near to nothing but itself, however wide the tolerance is.
            is_near = (distance <= limit) & np.isfinite(distance)
            differs = ~(is_near | _are_same(wide_a, wide_b))
        if not differs.any():
            return
        self._count(differs, a, b, index)
        far, of = distance[differs], size[differs]
        far = np.where(
            np.isnan(far), np.where(_are_same(wide_a, wide_b)[differs], 0.0, np.inf), far
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(far == 0, 0.0, far / of)
        relative = np.where(np.isnan(relative), np.inf, relative)
        assert self.max_abs is not None and self.max_rel is not None
        self.max_abs = max(self.max_abs, float(far.max()))
        self.max_rel = max(self.max_rel, float(relative.max()))

    def _count(
        self,
        differs: Array,
        a: torch.Tensor,
        b: torch.Tensor,
        index: Callable[[int], tuple[int, ...]],
    ) -> None:
        count = int(differs.sum())
        if count and self.first is None:
            at = int(differs.argmax())
            self.first, self.values = index(at), (_shown(a[at]), _shown(b[at]))
        self.different += count


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> Array:
    rows = (a.numel(), a.element_size())
    same: Array = (_bits(a).view(rows) == _bits(b).view(rows)).all(dim=1).numpy()
    return same


def _wide(tensor: torch.Tensor) -> Array:
    """The elements in a dtype of NumPy's that loses nothing."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).numpy()
    if tensor.dtype == torch.uint64:
        return tensor.numpy()
    return tensor.numpy().astype(np.int64)


def _distance(a: Array, b: Array) -> Array:
    """``|a - b|`` as float64."""
    if a.dtype == b.dtype and a.dtype.kind in "iu":
        # In 64 bits, where a difference that does not fit wraps round to what it is unsigned.
        larger, smaller = np.maximum(a, b), np.minimum(a, b)
        return (larger.view(np.uint64) - smaller.view(np.uint64)).astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart: Array = np.abs(a.astype(np.result_type(a, np.float64)) - b)
    return apart


def _are_same(a: Array, b: Array) -> Array:
    """Equal numbers, equal infinities, and what is no number on both sides."""
    same: Array = (a == b) | ((a != a) & (b != b))
    return same


def _index(offsets: Sequence[int], sizes: Sequence[int], start: int, at: int) -> tuple[int, ...]:
    inner = np.unravel_index(start + at, sizes) if sizes else ()
    return tuple(int(offset + i) for offset, i in zip(offsets, inner, strict=True))


def _shown(element: torch.Tensor) -> str:
    if element.dtype == _PACKED:
        return f"0x{int(element.view(torch.uint8)):02x}"
    return str(_wide(element.reshape(1))[0].item())
