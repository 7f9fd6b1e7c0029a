"""Node ``map`` of the save: entries as the rules make them, still over the caller's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dcp_pipeline.core.affine import Mapped, Part, boxes, restricted, whole
from dcp_pipeline.core.path import Path, assign_names
from dcp_pipeline.core.table import Kind
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.rules.mapping import mapped_forward
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Entries, Entry, Piece
from dcp_pipeline.types.strided import view_of

__all__ = ["map_entries"]


def map_entries(entries: Entries, job: SaveJob) -> Entries:
    """Pass this rank's entries through the rules.

    Raises:
        RuleError: a key that no rule takes, two that become one, tensors that do not fit together.
    """
    names = assign_names([entry.path for entry in entries])
    tensors = {
        name: None
        if entry.dtype is None
        else whole(names[entry.alias if entry.alias >= 0 else at], entry.dtype, entry.shape)
        for at, (name, entry) in enumerate(zip(names, entries, strict=True))
    }
    outcome = mapped_forward(job.parts.rules, tensors, job.coordinator.world_size > 1)
    outcome.raise_problems("the state")
    by_name = dict(zip(names, entries, strict=True))
    mapped = Entries()
    places: dict[Mapped, int] = {}
    for name, tensor in outcome.tensors.items():
        origin = outcome.origins[name]
        source = by_name.get(origin.sources[0]) if len(origin.sources) == 1 else None
        is_renamed = source is None or name != origin.sources[0]
        path: Path = (name,) if source is None or is_renamed else source.path
        if tensor is None:
            assert source is not None
            mapped.append(replace(source, path=path))
            continue
        alias = places.setdefault(tensor, len(mapped)) if tensor.sources else len(mapped)
        mapped.append(
            replace(_entry(tensor, source, by_name), path=path)
            if alias == len(mapped)
            else replace(mapped[alias], path=path, alias=alias, pieces=mapped[alias].pieces)
        )
    return mapped


def _entry(tensor: Mapped, source: Entry | None, by_name: dict[str, Entry]) -> Entry:
    """The entry of a tensor; its path is left open."""
    (key, *others) = tensor.sources or ("",)
    if not others and key in by_name:
        held = by_name[key]
        assert held.dtype is not None
        if tensor.is_copy_of(key, held.dtype, held.shape):
            return replace(held, alias=-1)
    pieces = tuple(piece for part in tensor.parts for piece in _pieces(part, by_name))
    target = DTYPES[tensor.dtype]
    return Entry(
        (),
        source.kind if source is not None else Kind.TENSOR,
        tensor.dtype,
        tensor.shape,
        tuple(replace(piece, data=piece.data.to(target)) for piece in pieces),
    )


def _pieces(part: Part, by_name: dict[str, Entry]) -> Iterator[Piece]:
    """What this rank holds of a part, each a box of the target."""
    if part.source is None:
        offsets, sizes = part.box("target")
        # Of a dtype that holds any constant; it is converted to the tensor's.
        yield Piece(
            offsets, sizes, torch.full(sizes, part.value, dtype=torch.float64, device="cpu")
        )
        return
    for held in by_name[part.source].pieces:
        for inner in restricted(part, "source", (held.offsets, held.sizes)):
            for box in boxes(inner, "target"):
                offsets, sizes = box.box("target")
                yield Piece(offsets, sizes, view_of(box, "source", held.data, held.offsets))
