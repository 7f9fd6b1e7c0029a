"""Ways to shard a tensor, and the DTensors of each rank, made without a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["MESHES", "Sharding", "dtensor_of", "meshes", "part_of", "shapes", "shardings"]

MESHES = ((1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2))


@dataclass(frozen=True)
class Sharding:
    """Placements on a mesh of ranks, the last dimension of which counts quickest."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` is in the mesh."""
        place: list[int] = []
        for extent in reversed(self.mesh):
            rank, position = divmod(rank, extent)
            place.insert(0, position)
        return tuple(place)


def part_of(whole: torch.Tensor, sharding: Sharding, rank: int) -> torch.Tensor:
    """What ``rank`` holds, cut by torch's own placements."""
    part = whole
    coordinate = sharding.coordinate(rank)
    for extent, position, placement in zip(
        sharding.mesh, coordinate, sharding.placements, strict=True
    ):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(part, extent, with_padding=False, contiguous=True)
            part = parts[position]
    return part.clone()


def dtensor_of(
    local: torch.Tensor, shape: tuple[int, ...], sharding: Sharding, rank: int
) -> DTensor:
    """The DTensor of global ``shape`` that ``rank`` has ``local`` of."""
    ranks = torch.arange(math.prod(sharding.mesh)).reshape(sharding.mesh)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        mesh,
        sharding.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def shapes(largest: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """From 0 to 4 dimensions, extents 0 and 1 among them."""
    return st.lists(st.integers(0, largest), min_size=0, max_size=4).map(tuple)


def meshes() -> st.SearchStrategy[tuple[int, ...]]:
    """Of 1 to 4 ranks, in one or two dimensions."""
    return st.sampled_from(MESHES)


@st.composite
def shardings(
    draw: st.DrawFn, shape: tuple[int, ...], mesh: tuple[int, ...] | None = None
) -> Sharding:
    """Any placements of a tensor of ``shape``."""
    if mesh is None:
        mesh = draw(meshes())
    kinds = ["replicate"] if not shape else ["replicate", "shard", "shard", "strided"]
    placements: list[Placement] = []
    for _ in mesh:
        kind = draw(st.sampled_from(kinds))
        if kind == "replicate":
            placements.append(Replicate())
            continue
        dimension = draw(st.integers(0, len(shape) - 1))
        if kind == "shard":
            placements.append(Shard(dimension))
        else:
            placements.append(_StridedShard(dimension, split_factor=draw(st.integers(1, 4))))
    return Sharding(mesh, tuple(placements))
