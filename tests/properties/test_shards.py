"""Which boxes a rank holds, against what torch's own placements give it."""

import itertools
import math

import torch
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_pipeline.state.pieces import pieces_of
from tests.properties.shards import MESHES, Sharding, dtensor_of, part_of, shapes, shardings


def holds_what_torch_says(shape: tuple[int, ...], sharding: Sharding) -> None:
    """Every rank's boxes show the elements that lie there, and all of them cover the tensor."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    times = torch.zeros(shape, dtype=torch.int64)
    for rank in range(math.prod(sharding.mesh)):
        local = part_of(whole, sharding, rank)
        found = pieces_of(dtensor_of(local, shape, sharding, rank))
        assert found.shape == shape
        assert sum(piece.data.numel() for piece in found.pieces) == local.numel()
        for piece in found.pieces:
            assert piece.data.numel() and tuple(piece.data.shape) == piece.sizes
            box = tuple(
                slice(begin, begin + count)
                for begin, count in zip(piece.offsets, piece.sizes, strict=True)
            )
            assert torch.equal(piece.data, whole[box])
            times[box] += 1
    copies = math.prod(
        extent
        for extent, placement in zip(sharding.mesh, sharding.placements, strict=True)
        if isinstance(placement, Replicate)
    )
    assert bool((times == copies).all())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_boxes_of_all_ranks_are_what_torch_gives_them(data: st.DataObject) -> None:
    shape = data.draw(shapes(9))
    holds_what_torch_says(shape, data.draw(shardings(shape)))


def test_every_sharding_of_a_vector_on_every_mesh() -> None:
    kinds = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=n) for n in (1, 2, 3))]
    for mesh in MESHES:
        for placements in itertools.product(kinds, repeat=len(mesh)):
            for extent in (0, 1, 2, 5, 7, 12):
                holds_what_torch_says((extent,), Sharding(mesh, placements))
