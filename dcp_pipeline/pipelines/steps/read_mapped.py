"""Reads the pieces of tensors that rules make of stored ones; each rank just what its own need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from dcp_pipeline.core.affine import boxes, restricted
from dcp_pipeline.core.packing import Column
from dcp_pipeline.pipelines.steps.read_boxes import CastCounts, box_reads
from dcp_pipeline.pipelines.steps.read_items import Located
from dcp_pipeline.state.targets import TensorTarget
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.dtypes import dtype_name
from dcp_pipeline.types.entries import Piece
from dcp_pipeline.types.strided import view_of

__all__ = ["Constant", "mapped_reads"]


@dataclass(frozen=True, slots=True)
class Constant:
    """Memory that takes one value, which no file holds.

    Attributes:
        name: of the tensor.
        view: the memory.
        value: of every element.
        is_fresh: whether there is nothing in it to restore.
    """

    name: str
    view: torch.Tensor
    value: float
    is_fresh: bool


def mapped_reads(
    located: Located,
    starts: Column,
    numbers: Mapping[str, int],
    target: TensorTarget,
    casts: CastCounts,
    constants: list[Constant],
    keep: Callable[[str, torch.Tensor], None] | None = None,
) -> Iterator[tuple[int, Read]]:
    """As ``box_reads``, for a target that is made of several stored tensors.

    Args:
        starts: ``[keys + 1]`` the rows of each stored key in the table.
        numbers: of the stored keys, by name.
        constants: what is to be filled in is added to it.
    """
    assert target.mapped is not None
    keys = located.table.keys
    for piece in target.pieces:
        of_piece = dtype_name(piece.data.dtype)
        for part in target.mapped.parts:
            for inner in restricted(part, "target", (piece.offsets, piece.sizes)):
                if inner.source is None:
                    for box in boxes(inner, "target"):
                        view = piece.data
                        for axis, (at, extent) in enumerate(zip(*box.box("target"), strict=True)):
                            view = view.narrow(axis, at - piece.offsets[axis], extent)
                        constants.append(Constant(target.name, view, inner.value, target.is_fresh))
                    continue
                key = numbers[inner.source]
                stored = keys[key].dtype
                assert stored is not None
                rows = range(int(starts[key]), int(starts[key + 1]))
                for box in boxes(inner, "source"):
                    view = view_of(box, "target", piece.data.detach(), piece.offsets)
                    one = replace(
                        target,
                        key=key,
                        dtype=stored,
                        target_dtype=None if stored == of_piece else of_piece,
                        pieces=(Piece(*box.box("source"), view),),
                    )
                    yield from box_reads(located, rows, one, casts, keep, counted=target)
