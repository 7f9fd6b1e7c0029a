"""Several tensors as one along an axis: query, key and value, or gate and up."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.core.affine import Mapped, joined
from dcp_pipeline.rules.base import KeyRule
from dcp_pipeline.rules.keys import Keys
from dcp_pipeline.rules.patterns import Bound, Pattern

__all__ = ["FuseRule", "SplitRule"]


class FuseRule(KeyRule):
    """Several tensors in the state, one in the checkpoint.

    Args:
        several: pattern of each, in the order in which they lie in the fused one.
        one: pattern of the fused key, with the same places.
        axis: along which they are joined.
        parts: how large each is against the others; ``None`` for all alike.
        groups: the tensors are cut into so many groups, and those are joined group by group, as
            Megatron has a query group's heads beside its key and value.
    """

    kind = "fuse"

    def __init__(
        self,
        several: Sequence[str],
        one: str,
        axis: int = 0,
        parts: Sequence[int] | None = None,
        groups: int = 1,
    ) -> None:
        self._several, self._one = [Pattern(text) for text in several], Pattern(one)
        self._axis, self._groups = axis, groups
        self._parts = tuple(parts or [1] * len(self._several))

    def forward(self, keys: Keys) -> None:
        self._fuse(keys)

    def backward(self, keys: Keys) -> None:
        self._split(keys)

    def _fuse(self, keys: Keys) -> None:
        groups: dict[str, tuple[Bound, dict[int, str]]] = {}
        for name in keys.names():
            for number, pattern in enumerate(self._several):
                places = pattern.match(name)
                if places is not None:
                    groups.setdefault(self._one.format(places), (places, {}))[1][number] = name
                    break
        for one, (bound, members) in groups.items():
            lacking = [p for number, p in enumerate(self._several) if number not in members]
            if lacking and not keys.is_partial:
                shown = ", ".join(repr(pattern.format(bound)) for pattern in lacking)
                keys.problems.append(f"{self.label}: {one!r} lacks {shown}")
                continue
            tensors = {n: keys.tensor(name, self.label) for n, name in members.items()}
            found = {n: tensor for n, tensor in tensors.items() if tensor is not None}
            if len(found) < len(members):
                continue
            try:
                fused = self._joined(found)
            except (ValueError, IndexError) as error:
                keys.problems.append(f"{self.label}: {one!r}: {error}")
                continue
            keys.replace([members[n] for n in sorted(members)], {one: fused}, self.label)

    def _joined(self, found: dict[int, Mapped]) -> Mapped:
        axis, groups = self._axis, self._groups
        number, first = next(iter(found.items()))
        unit, rest = divmod(first.shape[axis], self._parts[number] * groups)
        for other, tensor in found.items():
            if rest or tensor.shape[axis] != unit * self._parts[other] * groups:
                sizes = [found[n].shape[axis] for n in sorted(found)]
                raise ValueError(
                    f"the sizes {sizes} along axis {axis} are not as parts {list(self._parts)} of"
                    f" {groups} groups"
                )
            if tensor.dtype != first.dtype:
                raise ValueError(f"it would be of {first.dtype} and of {tensor.dtype}")
        pieces = []
        for number, part in enumerate(self._parts):
            size = unit * part
            shape = (*first.shape[:axis], size * groups, *first.shape[axis + 1 :])
            tensor = found.get(number) or Mapped(first.dtype, shape, ())
            pieces.append(tensor.unfolded(axis, size) if size else tensor.unsqueezed(axis))
        return joined(pieces, axis + 1).folded(axis)

    def _split(self, keys: Keys) -> None:
        for name in keys.names():
            bound = self._one.match(name)
            if bound is None:
                continue
            tensor = keys.tensor(name, self.label)
            if tensor is None:
                continue
            shape, axis = tensor.shape, self._axis
            total = sum(self._parts) * self._groups
            if axis >= len(shape) or not shape[axis] or shape[axis] % total:
                keys.problems.append(
                    f"{self.label}: {name!r} of {list(shape)} cannot be cut along axis {axis} into"
                    f" parts {list(self._parts)} of {self._groups} groups"
                )
                continue
            unit = shape[axis] // total
            grouped = tensor.unfolded(axis, unit * sum(self._parts))
            made, start = {}, 0
            for pattern, part in zip(self._several, self._parts, strict=True):
                stop = start + unit * part
                made[pattern.format(bound)] = grouped.cut(axis + 1, start, stop).folded(axis)
                start = stop
            keys.replace([name], made, self.label)


class SplitRule(FuseRule):
    """One tensor in the state, several in the checkpoint: the inverse of :class:`FuseRule`."""

    kind = "split"

    def forward(self, keys: Keys) -> None:
        self._split(keys)

    def backward(self, keys: Keys) -> None:
        self._fuse(keys)
