"""The elements of a part of a mapped tensor, as views of memory that holds a box of one side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcp_pipeline.core.affine import Part, Side

__all__ = ["view_of"]


def view_of(part: Part, held: Side, data: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    """The elements of a part that is a box on the other side, in the order of that side's axes.

    Args:
        part: with at most one loop along each axis of the other side.
        held: the side that ``data`` holds a box of.
        data: shaped as that box.
        offsets: of the box.

    Returns:
        A view of ``data`` in the shape of the part's box on the other side.
    """
    other: Side = "target" if held == "source" else "source"
    _, shape = part.box(other)
    strides = [0] * len(shape)
    start = data.storage_offset()
    for axis, first in enumerate(part.first(held)):
        start += (first - offsets[axis]) * data.stride(axis)
    for loop in part.loops:
        strides[loop.axis(other)] = loop.step(held) * data.stride(loop.axis(held))
    # An axis of one element may have any stride; one that fits the next keeps the view dense.
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            inner = axis + 1 < len(shape)
            strides[axis] = shape[axis + 1] * strides[axis + 1] if inner else 1
    return data.as_strided(shape, strides, start)
