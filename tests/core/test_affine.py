"""Tensors described by where their elements come from, against NumPy doing the same to elements."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dcp_pipeline.core.affine import Mapped, Part, constant, joined, restricted, whole

Array = np.ndarray


def elements(part: Part, side: str) -> list[tuple[int, ...]]:
    """The indices that a part touches on one side, loop by loop."""
    found = [part.first(side)]  # type: ignore[arg-type]
    for loop in part.loops:
        axis, step = loop.axis(side), loop.step(side)  # type: ignore[arg-type]
        found = [
            tuple(i + step * n if a == axis else i for a, i in enumerate(index))
            for index in found
            for n in range(loop.extent)
        ]
    return found


def made(mapped: Mapped, sources: dict[str, Array], empty: int = -9) -> Array:
    """Its elements; each may be written once only."""
    result = np.full(mapped.shape, empty)
    seen = np.zeros(mapped.shape, int)
    for part in mapped.parts:
        for n, target in enumerate(elements(part, "target")):
            if part.source is None:
                result[target] = part.value
            else:
                result[target] = sources[part.source][elements(part, "source")[n]]
            seen[target] += 1
    assert seen.max(initial=0) <= 1
    assert (seen == 1).all() or (result == empty).any()
    return result


@st.composite
def chains(draw: st.DrawFn) -> tuple[Mapped, Array, dict[str, Array]]:
    """A few sources through some operations, and the same done by NumPy."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    count = int(np.prod(shape))
    sources = {
        name: np.arange(count).reshape(shape) + 1000 * n for n, name in enumerate("ab", start=1)
    }
    mapped, array = whole("a", "int64", shape), sources["a"]
    for _ in range(draw(st.integers(1, 6))):
        axis = draw(st.integers(0, array.ndim - 1))
        size = array.shape[axis]
        match draw(st.sampled_from(["transpose", "cut", "join", "pad", "fold", "unfold", "new"])):
            case "transpose":
                order = draw(st.permutations(range(array.ndim)))
                mapped, array = mapped.transposed(order), array.transpose(order)
            case "cut":
                start = draw(st.integers(0, size - 1))
                stop = draw(st.integers(start + 1, size))
                mapped = mapped.cut(axis, start, stop)
                array = np.take(array, range(start, stop), axis)
            case "join" if array.size < 300:
                other = whole("b", "int64", shape)
                if list(array.shape) == shape:
                    mapped = joined([mapped, other], axis)
                    array = np.concatenate([array, sources["b"]], axis)
            case "pad" if array.size < 300:
                mapped = mapped.padded(axis, size + 2, 7)
                widths = [(0, 2 * (a == axis)) for a in range(array.ndim)]
                array = np.pad(array, widths, constant_values=7)
            case "fold" if axis + 1 < array.ndim:
                mapped = mapped.folded(axis)
                folded = (*array.shape[:axis], -1, *array.shape[axis + 2 :])
                array = array.reshape(folded)
            case "unfold" if array.ndim < 5:
                inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
                mapped = mapped.unfolded(axis, inner)
                unfolded = (*array.shape[:axis], size // inner, inner, *array.shape[axis + 1 :])
                array = array.reshape(unfolded)
            case "new" if array.ndim < 5:
                mapped, array = mapped.unsqueezed(axis), np.expand_dims(array, axis)
    return mapped, array, sources


@settings(max_examples=300, deadline=None)
@given(chains())
def test_any_chain_is_what_numpy_makes(chain: tuple[Mapped, Array, dict[str, Array]]) -> None:
    mapped, array, sources = chain
    assert mapped.shape == array.shape
    assert (made(mapped, sources) == array).all()


@settings(max_examples=200, deadline=None)
@given(chains(), st.data())
def test_a_box_of_the_target(
    chain: tuple[Mapped, Array, dict[str, Array]], data: st.DataObject
) -> None:
    mapped, array, sources = chain
    low = [data.draw(st.integers(0, n - 1)) for n in array.shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, array.shape, strict=True)]
    box = (low, [b - a for a, b in zip(low, high, strict=True)])
    parts = tuple(p for part in mapped.parts for p in restricted(part, "target", box))
    found = made(Mapped("int64", mapped.shape, parts), sources)
    inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
    assert (found[inside] == array[inside]).all()
    found[inside] = -9
    assert (found == -9).all()


@settings(max_examples=200, deadline=None)
@given(chains(), st.data())
def test_a_box_of_the_source(
    chain: tuple[Mapped, Array, dict[str, Array]], data: st.DataObject
) -> None:
    mapped, array, sources = chain
    shape = sources["a"].shape
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
    box = (low, [b - a for a, b in zip(low, high, strict=True)])
    parts = tuple(
        p for part in mapped.parts if part.source == "a" for p in restricted(part, "source", box)
    )
    found = made(Mapped("int64", mapped.shape, parts), sources)
    inside = {int(v) for v in sources["a"][tuple(map(slice, low, high))].flat}
    wanted = np.where(np.isin(array, list(inside)), array, -9)
    assert (found == wanted).all()


def test_rotary_halves_are_one_part() -> None:
    heads, size, width = 4, 6, 5
    mapped = whole("q", "float32", [heads * size, width])
    mapped = mapped.unfolded(0, size).unfolded(1, 2).transposed([0, 2, 1, 3]).folded(1).folded(0)
    assert len(mapped.parts) == 1
    source = np.arange(heads * size * width).reshape(heads * size, width)
    swapped = source.reshape(heads, size // 2, 2, width).swapaxes(1, 2).reshape(source.shape)
    assert (made(mapped, {"q": source}) == swapped).all()


def test_what_is_a_plain_copy() -> None:
    shape = [4, 3]
    tensor = whole("w", "float32", shape)
    for same in (
        tensor,
        tensor.transposed([1, 0]).transposed([1, 0]),
        tensor.cut(0, 0, 4).unsqueezed(1).squeezed(1),
    ):
        assert same.is_copy_of("w", "float32", shape)
    for other in (
        tensor.transposed([1, 0]),
        tensor.cut(0, 0, 3),
        replace(tensor, dtype="bfloat16"),
        whole("v", "float32", shape),
        constant("float32", shape, 1.0),
    ):
        assert not other.is_copy_of("w", "float32", shape)


def test_elements_that_are_left_as_they_are() -> None:
    grown = whole("w", "float32", [2, 2]).padded(0, 3, None)
    found = made(grown, {"w": np.ones((2, 2), int)})
    assert found.tolist() == [[1, 1], [1, 1], [-9, -9]]


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.transposed([0, 0]),
        lambda t: t.cut(0, 1, 9),
        lambda t: t.padded(0, 1),
        lambda t: t.squeezed(0),
        lambda t: t.unfolded(0, 3),
        lambda t: joined([t, t.cut(1, 0, 1)], 0),
    ],
)
def test_what_does_not_fit_is_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError):
        make(whole("w", "float32", [4, 3]))


def test_nothing_at_all() -> None:
    empty = whole("w", "float32", [0, 3])
    assert empty.parts == () and empty.transposed([1, 0]).shape == (3, 0)
    assert joined([empty, whole("v", "float32", [2, 3])], 0).is_copy_of("v", "float32", [2, 3])
