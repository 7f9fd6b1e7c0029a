"""Boxes of a tensor, hashed apart in any pieces, make the CRC of the whole."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcp_pipeline.core import runs
from dcp_pipeline.core.contributions import Contributions
from dcp_pipeline.core.crc64 import finished, raw_crc64, shift
from dcp_pipeline.core.runs import Box, crcs_of

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def elements(shape: Sequence[int], item: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A tensor; its last dimension holds the bytes of an element."""
    return np.random.default_rng(seed).integers(0, 256, (*shape, item), np.uint8)


def part(whole: np.ndarray[Any, Any], offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    return whole[box].tobytes()


def of_whole(whole: np.ndarray[Any, Any]) -> int:
    return finished(raw_crc64(whole.tobytes()), whole.size)


def of_boxes(whole: np.ndarray[Any, Any], boxes: Boxes, cuts: Sequence[float] = ()) -> int:
    """The CRC of the whole from its boxes, each hashed in pieces."""
    shape, item = whole.shape[:-1], whole.shape[-1]
    raw = 0
    for offsets, sizes in boxes:
        data = memoryview(part(whole, offsets, sizes))
        edges = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
        for begin, end in itertools.pairwise(edges):
            box = Box(tuple(shape), tuple(offsets), tuple(sizes), item)
            found = list(crcs_of(box, begin, data[begin:end]))
            values, trailing = zip(*found, strict=True)
            moved = shift(np.asarray(values, np.uint64), np.asarray(trailing, np.int64))
            raw ^= int(np.bitwise_xor.reduce(moved))
    return finished(raw, whole.size)


def split(draw: Any, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> Boxes:
    """A box cut in two, and each of the halves again."""
    wide = [d for d, size in enumerate(sizes) if size > 1]
    if not depth or not wide:
        return [(offsets, sizes)]
    d = draw(st.sampled_from(wide))
    at = draw(st.integers(1, sizes[d] - 1))
    low = (*sizes[:d], at, *sizes[d + 1 :])
    high = (*sizes[:d], sizes[d] - at, *sizes[d + 1 :])
    moved = (*offsets[:d], offsets[d] + at, *offsets[d + 1 :])
    return split(draw, offsets, low, depth - 1) + split(draw, moved, high, depth - 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], int, Boxes]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    item = draw(st.sampled_from([1, 2, 4, 8, 16]))
    boxes = split(draw, (0,) * len(shape), shape, draw(st.integers(0, 4)))
    return shape, item, draw(st.permutations(boxes))


@settings(max_examples=300, deadline=None)
@given(tilings(), st.lists(st.floats(0, 1), max_size=3))
def test_any_tiling_in_any_pieces_makes_the_whole(
    tiling: tuple[tuple[int, ...], int, Boxes], cuts: list[float]
) -> None:
    shape, item, boxes = tiling
    whole = elements(shape, item)
    assert of_boxes(whole, boxes, cuts) == of_whole(whole)


@pytest.mark.parametrize("ways", [None, 0, 1, 2, 3])
def test_every_way_to_hash_runs_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, ways: int | None
) -> None:
    def chosen(levels: Any, run: int) -> int | None:
        return ways if ways is None else min(ways, len(levels))

    monkeypatch.setattr(runs, "_levels_to_lay_out", chosen)
    monkeypatch.setattr(runs, "_SCRATCH", 500)
    monkeypatch.setattr(runs, "_ROWS", 7)
    for seed, (shape, item) in enumerate([((9, 8, 7, 6), 2), ((5, 6, 7), 3), ((40, 9), 4)]):
        whole = elements(shape, item, seed)
        sizes = tuple(max(1, size // 2) for size in shape)
        corners = itertools.product(
            *(((0, s), (s, n - s)) for s, n in zip(sizes, shape, strict=True))
        )
        boxes = [
            (tuple(low for low, _ in corner), tuple(size for _, size in corner))
            for corner in corners
        ]
        assert of_boxes(whole, boxes, (0.1, 0.37, 0.9)) == of_whole(whole)


def test_ways_are_chosen_by_what_they_cost() -> None:
    choose = runs._levels_to_lay_out
    assert choose(((100, 1 << 20),), 1 << 19) == 0  # long runs
    assert choose(((1_000_000, 16),), 4) == 1  # short ones, close together
    assert choose(((1_000_000, 1 << 16),), 4) is None  # short ones, far apart
    assert choose(((100, 1 << 24), (1000, 16)), 4) == 1


class Calls:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, data: memoryview, raw: int = 0) -> int:
        self.count += 1
        return raw_crc64(data, raw)


def test_a_million_runs_of_a_few_bytes_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(runs, "raw_crc64", calls)
    monkeypatch.setattr(runs, "raw_crcs", None)
    shape = (200_000, 4)
    whole = elements(shape, 4)
    columns: Boxes = [((0, column), (shape[0], 1)) for column in range(4)]
    assert of_boxes(whole, columns) == of_whole(whole)
    assert calls.count < 200
    far = Box((200_000, 10_000), (0, 3), (200_000, 1), 4)
    calls.count = 0
    assert len(list(crcs_of(far, 0, memoryview(bytes(800_000))))) < 20
    assert calls.count == 0


def chunks_of(boxes: Boxes, whole: np.ndarray[Any, Any]) -> Iterator[bytes]:
    for offsets, sizes in boxes:
        yield part(whole, offsets, sizes)


@settings(max_examples=100, deadline=None)
@given(tilings(), st.integers(1, 50), st.booleans())
def test_contributions_of_a_file(
    tiling: tuple[tuple[int, ...], int, Boxes], step: int, backwards: bool
) -> None:
    """Chunks with other bytes between them, seen in pieces, in any order."""
    shape, item, boxes = tiling
    whole = elements(shape, item, 1)
    file, starts, lengths = b"", [], []
    for data in chunks_of(boxes, whole):
        file += b"frame"
        starts.append(len(file))
        lengths.append(len(data))
        file += data
    # A value, of which nothing is taken.
    starts.append(len(file))
    lengths.append(0)
    taken = Contributions(starts, lengths, lambda chunk: Box(shape, *boxes[chunk], item))
    places = range(0, len(file) + 3, step)
    for at in reversed(places) if backwards else places:
        taken.add(at, memoryview((file + b"end")[at : at + step]))
    words, nbytes = taken.result()
    assert nbytes.tolist() == lengths and words[-1] == 0
    assert finished(int(np.bitwise_xor.reduce(words)), whole.size) == of_whole(whole)
