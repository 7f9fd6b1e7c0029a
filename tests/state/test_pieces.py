"""``pieces_of`` against torch itself: the pieces of all ranks make the full tensor."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_pipeline.core.errors import StateError, UnsupportedLeafError
from dcp_pipeline.state.pieces import pieces_of
from tests.distributed.pool import Pool
from tests.state.placements import placements_of

SHAPES = [(1,), (2,), (5,), (8,), (13,), (4, 4), (7, 3), (3, 7), (1, 9), (0, 3), (2, 3, 5)]
ONE = [["S0"], ["R"], ["S-1"]]
TWO = [list(pair) for pair in itertools.product(["S0", "S-1", "R"], repeat=2)]
STRIDED = [["S0/2", "S0"], ["S-1/2", "S-1"], ["S0/2", "R"]]

Boxes = list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]


def boxes_of(mesh_shape: list[int], shape: tuple[int, ...], placements: list[str]) -> Any:
    """This rank's boxes, and the whole tensor as torch puts it together."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    source = torch.arange(math.prod(shape)).reshape(shape)
    value = distribute_tensor(source, mesh, placements_of(placements), src_data_rank=None)
    found = pieces_of(value)
    assert (found.shape, found.dtype) == (shape, "int64")
    assert found.may_repeat == ("R" in placements)
    boxes = [(piece.offsets, piece.sizes, piece.data.clone()) for piece in found.pieces]
    return boxes, value.full_tensor()


def boxes_of_all(mesh: list[int], cases: list[tuple[tuple[int, ...], list[str]]]) -> list[Any]:
    return [boxes_of(mesh, shape, placements) for shape, placements in cases]


def assert_covers(boxes: Boxes, whole: torch.Tensor, copies: int) -> None:
    count = torch.zeros(whole.shape, dtype=torch.int64)
    for offsets, sizes, data in boxes:
        region = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
        assert tuple(data.shape) == sizes and 0 not in sizes
        assert torch.equal(whole[region], data)
        count[region] += 1
    assert (count == copies).all()


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    [([2], ONE), ([3], ONE), ([4], ONE), ([2, 2], TWO), ([2, 2], STRIDED)],
    ids=str,
)
def test_pieces_of_all_ranks_make_the_full_tensor(
    ranks: Pool, mesh: list[int], kinds: list[list[str]]
) -> None:
    cases = [(shape, placements) for placements in kinds for shape in SHAPES]
    results = ranks(math.prod(mesh)).run(boxes_of_all, mesh, cases)
    for case, per_rank in zip(cases, zip(*results, strict=True), strict=True):
        shape, placements = case
        whole = per_rank[0][1]
        assert torch.equal(whole, torch.arange(math.prod(shape)).reshape(shape)), case
        copies = math.prod(n for n, p in zip(mesh, placements, strict=True) if p == "R")
        assert_covers([box for boxes, _ in per_rank for box in boxes], whole, copies)


def wrong_local() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(3 + dist.get_rank())
    value = DTensor.from_local(
        local, mesh, placements_of(["S0"]), shape=torch.Size([6]), stride=(1,)
    )
    try:
        pieces_of(value)
    except StateError as error:
        return str(error)
    return "fine"


def test_a_local_tensor_that_its_placements_do_not_explain(ranks: Pool) -> None:
    fine, said = ranks(2).run(wrong_local)
    assert fine == "fine"
    assert "[4]" in said and "[3]" in said


class Chunked:
    """DCP's protocol for tensor-like objects."""

    dtype = torch.float32
    shape = torch.Size([4, 2])

    def __init__(self, sizes: list[int] | None = None) -> None:
        self._sizes = sizes or [2, 2]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size(self._sizes)) for at in (0, 2)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return torch.full((2, 2), float(index.offset[0]))


def test_dcps_protocol() -> None:
    pieces = pieces_of(Chunked()).pieces
    assert [(p.offsets, p.sizes, p.data[0, 0].item()) for p in pieces] == [
        ((0, 0), (2, 2), 0.0),
        ((2, 0), (2, 2), 2.0),
    ]
    with pytest.raises(StateError, match="Chunked announces"):
        pieces_of(Chunked([2, 1]))


def test_plain_tensors_are_not_copied() -> None:
    whole = torch.arange(24).reshape(4, 6)
    for view in (whole, whole.t(), whole[1:3, ::2], whole[2, 3]):
        (piece,) = pieces_of(view).pieces
        assert piece.data.data_ptr() == view.data_ptr() and piece.sizes == tuple(view.shape)
    assert pieces_of(torch.empty(0, 3)).pieces == ()
    with pytest.raises(UnsupportedLeafError, match="dtype"):
        pieces_of(torch.zeros(1, dtype=torch.bits8))
