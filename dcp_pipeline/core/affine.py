"""Tensors described by where their elements come from, without any element being moved.

A :class:`Mapped` tensor is tiled by parts. A part copies a grid of elements from a source tensor,
or repeats a constant. Along each of its loops the source and the target advance by fixed steps, so
that slices, joins, transposes and folded axes of stored tensors are again such parts, of any of
which a rank can work out just the piece that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

__all__ = ["Loop", "Mapped", "Part", "Side", "boxes", "constant", "joined", "restricted", "whole"]

Side = Literal["source", "target"]


@dataclass(frozen=True, slots=True)
class Loop:
    """One dimension of the grid of a part.

    Attributes:
        extent: elements along it, at least 2.
        source, source_step: the axis of the source that it runs along, and by how much.
        target, target_step: the same for the target. Steps are positive.
    """

    extent: int
    source: int
    source_step: int
    target: int
    target_step: int

    def axis(self, side: Side) -> int:
        """The axis on one side."""
        return self.source if side == "source" else self.target

    def step(self, side: Side) -> int:
        """The step on one side."""
        return self.source_step if side == "source" else self.target_step


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one source that go to one target.

    Of all loops along one axis, one with a greater step passes over all that the others reach; so
    every element is met once, and the loops read like the digits of its index.

    Attributes:
        source: key of the source, ``None`` for a constant.
        begin: index of the first element in the source; empty for a constant.
        at: index of the first element in the target.
        loops: of the grid; the source's side of a constant's is not used.
        value: the constant.
    """

    source: str | None
    begin: tuple[int, ...]
    at: tuple[int, ...]
    loops: tuple[Loop, ...]
    value: float = 0.0

    @property
    def elements(self) -> int:
        """How many there are."""
        return prod(loop.extent for loop in self.loops)

    def first(self, side: Side) -> tuple[int, ...]:
        """Index of the first element on one side."""
        return self.begin if side == "source" else self.at

    def box(self, side: Side) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First index and extent of the smallest box that holds the elements on one side."""
        first = self.first(side)
        extent = [1] * len(first)
        for loop in self.loops:
            extent[loop.axis(side)] += (loop.extent - 1) * loop.step(side)
        return first, tuple(extent)

    def moved(self, by: Sequence[int]) -> Part:
        """The same elements at another place of the target."""
        return replace(self, at=tuple(a + b for a, b in zip(self.at, by, strict=True)))

    def fixed(self, loop: Loop, index: int, count: int = 1) -> Part:
        """The elements of ``count`` steps of one of its loops, from ``index`` on."""
        begin, at = list(self.begin), list(self.at)
        if self.source is not None:
            begin[loop.source] += index * loop.source_step
        at[loop.target] += index * loop.target_step
        kept = () if count == 1 else (replace(loop, extent=count),)
        loops = tuple(new for old in self.loops for new in (kept if old is loop else (old,)))
        return replace(self, begin=tuple(begin), at=tuple(at), loops=loops)


def restricted(part: Part, side: Side, box: tuple[Sequence[int], Sequence[int]]) -> Iterator[Part]:
    """The elements of a part that lie in a box on one side, as parts.

    Args:
        box: first index and extent.
    """
    parts = [part]
    for axis, (first, extent) in enumerate(zip(*box, strict=True)):
        parts = [p for one in parts for p in _along(one, side, axis, first, first + extent)]
    yield from parts


def _along(part: Part, side: Side, axis: int, low: int, high: int) -> Iterator[Part]:
    """The elements whose index along one axis is in ``[low, high)``."""
    first = part.first(side)[axis]
    loops = sorted(
        (loop for loop in part.loops if loop.axis(side) == axis), key=lambda loop: -loop.step(side)
    )
    last = first + sum((loop.extent - 1) * loop.step(side) for loop in loops)
    if last < low or first >= high:
        return
    if low <= first and last < high:
        yield part
        return
    outer, step = loops[0], loops[0].step(side)
    reach = last - first - (outer.extent - 1) * step
    # Steps of the outermost loop that touch the range, and those that lie in it altogether.
    touch_from = max(0, -(-(low - first - reach) // step))
    touch_to = min(outer.extent, (high - 1 - first) // step + 1)
    in_from = max(touch_from, -(-(low - first) // step))
    in_to = min(touch_to, (high - 1 - first - reach) // step + 1)
    if in_from >= in_to:
        in_from = in_to = touch_to
    for index in range(touch_from, in_from):
        yield from _along(part.fixed(outer, index), side, axis, low, high)
    if in_from < in_to:
        yield part.fixed(outer, in_from, in_to - in_from)
    for index in range(in_to, touch_to):
        yield from _along(part.fixed(outer, index), side, axis, low, high)


def boxes(part: Part, side: Side) -> Iterator[Part]:
    """A part as parts that are each a box on one side, with at most one loop along an axis."""
    for axis in range(len(part.first(side))):
        along = [loop for loop in part.loops if loop.axis(side) == axis]
        dense = max((loop for loop in along if loop.step(side) == 1), default=None, key=_extent)
        loop = next((loop for loop in along if loop is not dense), None)
        if loop is not None:
            for index in range(loop.extent):
                yield from boxes(part.fixed(loop, index), side)
            return
    yield part


def _extent(loop: Loop) -> int:
    return loop.extent


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor made of others.

    Attributes:
        dtype: name of the element type that is asked for; parts of sources with another one are
            converted.
        shape: of the tensor.
        parts: which tile it, but for elements that are to be left as they are.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Keys of the sources, each once."""
        return tuple(dict.fromkeys(part.source for part in self.parts if part.source is not None))

    def is_copy_of(self, key: str, dtype: str, shape: Sequence[int]) -> bool:
        """Whether it is a source of this dtype and shape as it is."""
        return self == whole(key, dtype, shape)

    def transposed(self, order: Sequence[int]) -> Mapped:
        """Axis ``k`` of the result is axis ``order[k]`` of this one."""
        if sorted(order) != list(range(len(self.shape))):
            raise ValueError(f"{list(order)} is no order of the axes of {list(self.shape)}")
        place = {old: new for new, old in enumerate(order)}
        return self._changed(
            tuple(self.shape[old] for old in order),
            lambda part: replace(
                part,
                at=tuple(part.at[old] for old in order),
                loops=tuple(replace(loop, target=place[loop.target]) for loop in part.loops),
            ),
        )

    def cut(self, axis: int, start: int, stop: int) -> Mapped:
        """The elements from ``start`` to ``stop`` along an axis."""
        shape = self.shape
        if not 0 <= start <= stop <= shape[axis]:
            raise ValueError(f"{start} to {stop} is outside of axis {axis} of {list(shape)}")
        by = [0] * len(shape)
        by[axis] = -start
        parts = (p for part in self.parts for p in _along(part, "target", axis, start, stop))
        cut = (*shape[:axis], stop - start, *shape[axis + 1 :])
        return Mapped(self.dtype, cut, tuple(part.moved(by) for part in parts))

    def padded(self, axis: int, size: int, value: float | None = 0.0) -> Mapped:
        """As long as ``size`` along an axis; what is new holds ``value``, or ``None`` nothing."""
        extra = size - self.shape[axis]
        if extra < 0:
            raise ValueError(f"axis {axis} of {list(self.shape)} is longer than {size}")
        shape = (*self.shape[:axis], extra, *self.shape[axis + 1 :])
        filler = Mapped(self.dtype, shape, ())
        if value is not None:
            filler = constant(self.dtype, shape, value)
        return joined([self, filler], axis)

    def unsqueezed(self, axis: int) -> Mapped:
        """With a new axis of one element."""
        return self._changed(
            (*self.shape[:axis], 1, *self.shape[axis:]),
            lambda part: replace(
                part,
                at=(*part.at[:axis], 0, *part.at[axis:]),
                loops=_renumbered(part, lambda old: old + (old >= axis)),
            ),
        )

    def squeezed(self, axis: int) -> Mapped:
        """Without an axis of one element."""
        if self.shape[axis] != 1:
            raise ValueError(f"axis {axis} of {list(self.shape)} has not one element")
        return self._changed(
            (*self.shape[:axis], *self.shape[axis + 1 :]),
            lambda part: replace(
                part,
                at=(*part.at[:axis], *part.at[axis + 1 :]),
                loops=_renumbered(part, lambda old: old - (old > axis)),
            ),
        )

    def folded(self, axis: int) -> Mapped:
        """With an axis and the one behind it as one."""
        outer, inner = self.shape[axis : axis + 2]

        def fold(part: Part) -> Part:
            at = part.at[axis] * inner + part.at[axis + 1]
            loops = tuple(
                replace(loop, target_step=loop.target_step * inner) if loop.target == axis else loop
                for loop in part.loops
            )
            moved = replace(part, loops=loops)
            return replace(
                part,
                at=(*part.at[:axis], at, *part.at[axis + 2 :]),
                loops=_renumbered(moved, lambda old: old - (old > axis)),
            )

        return self._changed((*self.shape[:axis], outer * inner, *self.shape[axis + 2 :]), fold)

    def unfolded(self, axis: int, inner: int) -> Mapped:
        """With an axis as two, the second of ``inner`` elements; the inverse of :meth:`folded`."""
        size = self.shape[axis]
        if inner < 1 or size % inner:
            raise ValueError(f"axis {axis} of {list(self.shape)} is no multiple of {inner}")
        parts = []
        for part in self.parts:
            unfolded = _unfolded(part, axis, inner)
            if unfolded is None:
                # It does not follow the blocks; each block by itself does.
                blocks = (
                    block
                    for start in range(0, size, inner)
                    for block in _along(part, "target", axis, start, start + inner)
                )
                parts += [_in_one_block(block, axis, inner) for block in blocks]
            else:
                parts.append(unfolded)
        shape = (*self.shape[:axis], size // inner, inner, *self.shape[axis + 1 :])
        return Mapped(self.dtype, shape, tuple(parts))

    def _changed(self, shape: tuple[int, ...], change: Callable[[Part], Part]) -> Mapped:
        return Mapped(self.dtype, shape, tuple(change(part) for part in self.parts))


def whole(key: str, dtype: str, shape: Sequence[int]) -> Mapped:
    """A source as it is.

    >>> whole("w", "float32", [4, 3]).cut(0, 1, 3).transposed([1, 0]).shape
    (3, 2)
    """
    loops = tuple(Loop(n, axis, 1, axis, 1) for axis, n in enumerate(shape) if n > 1)
    zeros = (0,) * len(shape)
    parts = (Part(key, zeros, zeros, loops),) if prod(shape) else ()
    return Mapped(dtype, tuple(shape), parts)


def constant(dtype: str, shape: Sequence[int], value: float) -> Mapped:
    """A tensor whose elements are all the same."""
    loops = tuple(Loop(n, -1, 0, axis, 1) for axis, n in enumerate(shape) if n > 1)
    parts = (Part(None, (), (0,) * len(shape), loops, value),) if prod(shape) else ()
    return Mapped(dtype, tuple(shape), parts)


def joined(tensors: Sequence[Mapped], axis: int) -> Mapped:
    """One behind the other along an axis; the element type is the first one's.

    Raises:
        ValueError: they differ in another axis.
    """
    first = tensors[0]
    others = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    if len(others) > 1 or not -1 < axis < len(first.shape):
        shapes = ", ".join(str(list(t.shape)) for t in tensors)
        raise ValueError(f"tensors of the shapes {shapes} cannot be joined along axis {axis}")
    parts: list[Part] = []
    by = [0] * len(first.shape)
    for tensor in tensors:
        parts += [part.moved(by) for part in tensor.parts]
        by[axis] += tensor.shape[axis]
    return Mapped(first.dtype, (*first.shape[:axis], by[axis], *first.shape[axis + 1 :]), (*parts,))


def _renumbered(part: Part, axis_of: Callable[[int], int]) -> tuple[Loop, ...]:
    return tuple(replace(loop, target=axis_of(loop.target)) for loop in part.loops)


def _unfolded(part: Part, axis: int, inner: int) -> Part | None:
    """A part whose loops either stay in a block of ``inner`` or pass from block to block."""
    loops: list[Loop] = []
    for loop in part.loops:
        per_block, rest = divmod(inner, loop.target_step)
        is_split = loop.target == axis and not rest and 1 < per_block < loop.extent
        if is_split and loop.extent % per_block == 0:
            count, advance = loop.extent // per_block, per_block * loop.source_step
            loops.append(replace(loop, extent=count, source_step=advance, target_step=inner))
            loops.append(replace(loop, extent=per_block))
        else:
            loops.append(loop)
    within = [loop for loop in loops if loop.target == axis and loop.target_step % inner]
    reach = part.at[axis] % inner + sum((loop.extent - 1) * loop.target_step for loop in within)
    if reach >= inner:
        return None
    return _in_one_block(replace(part, loops=tuple(loops)), axis, inner)


def _in_one_block(part: Part, axis: int, inner: int) -> Part:
    def unfold(loop: Loop) -> Loop:
        if loop.target != axis:
            return replace(loop, target=loop.target + (loop.target > axis))
        if loop.target_step % inner:
            return replace(loop, target=axis + 1)
        return replace(loop, target_step=loop.target_step // inner)

    block, place = divmod(part.at[axis], inner)
    return replace(
        part,
        at=(*part.at[:axis], block, place, *part.at[axis + 1 :]),
        loops=tuple(map(unfold, part.loops)),
    )
