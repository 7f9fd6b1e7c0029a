"""Placements as short texts, which can be sent to ranks."""

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["placements_of"]


def placements_of(texts: list[str]) -> list[Placement]:
    """``S0`` shards dimension 0, ``S0/2`` in strides of 2, ``R`` replicates, ``P`` sums."""
    return [_placement(text) for text in texts]


def _placement(text: str) -> Placement:
    if text == "R":
        return Replicate()
    if text == "P":
        return Partial()
    dimension, _, strides = text[1:].partition("/")
    if strides:
        return _StridedShard(int(dimension), split_factor=int(strides))
    return Shard(int(dimension))
