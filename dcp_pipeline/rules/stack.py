"""Numbered tensors, such as experts or layers, as one with an axis more."""

from __future__ import annotations

from itertools import islice

from dcp_pipeline.core.affine import Mapped, joined
from dcp_pipeline.rules.base import KeyRule
from dcp_pipeline.rules.keys import Keys
from dcp_pipeline.rules.patterns import Pattern

__all__ = ["StackRule", "UnstackRule"]


class StackRule(KeyRule):
    """Many tensors in the state, one in the checkpoint.

    Args:
        many: pattern of the numbered keys.
        one: pattern of the stacked key.
        over: the place in ``many`` that counts along the new axis, from 0.
        axis: the new axis.
        count: how many there are; ``None`` for as many as are found. A rank that holds some of them
            only needs it.
    """

    kind = "stack"

    def __init__(
        self, many: str, one: str, over: str, axis: int = 0, count: int | None = None
    ) -> None:
        self._many, self._one = Pattern(many), Pattern(one)
        self._over, self._axis, self._count = over, axis, count

    def forward(self, keys: Keys) -> None:
        self._stack(keys)

    def backward(self, keys: Keys) -> None:
        self._unstack(keys)

    def _stack(self, keys: Keys) -> None:
        groups: dict[str, dict[int, str]] = {}
        for name in keys.names():
            bound = self._many.match(name)
            if bound is not None:
                groups.setdefault(self._one.format(bound), {})[int(bound[self._over])] = name
        for one, members in groups.items():
            tensors = {n: keys.tensor(name, self.label) for n, name in members.items()}
            found = {n: tensor for n, tensor in tensors.items() if tensor is not None}
            if len(found) == len(members):
                stacked = self._stacked(keys, one, members, found)
                if stacked is not None:
                    keys.replace([members[n] for n in sorted(members)], {one: stacked}, self.label)

    def _stacked(
        self, keys: Keys, one: str, members: dict[int, str], found: dict[int, Mapped]
    ) -> Mapped | None:
        count = self._count or max(found) + 1
        # Those that a message shows: a number that is far away means that nearly all lack.
        lacking = list(islice((n for n in range(count) if n not in found), 8))
        beyond = [members[n] for n in found if n >= count]
        kinds = {(tensor.dtype, tensor.shape) for tensor in found.values()}
        problems = []
        if lacking and not keys.is_partial:
            problems.append(f"{one!r} lacks {self._over} = {', '.join(map(str, lacking))}")
        if beyond:
            problems.append(f"{one!r} has {count} of them, and there is {beyond[0]!r}")
        if len(kinds) > 1:
            shown = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in sorted(kinds))
            problems.append(f"the tensors of {one!r} differ: {shown}")
        keys.problems += [f"{self.label}: {problem}" for problem in problems]
        if problems:
            return None
        ((dtype, shape),) = kinds
        if not 0 <= self._axis <= len(shape):
            keys.problems.append(f"{self.label}: {one!r} cannot have an axis {self._axis} more")
            return None
        gap = Mapped(dtype, shape, ())
        rows = [found.get(n, gap).unsqueezed(self._axis) for n in range(count)]
        return joined(rows, self._axis)

    def _unstack(self, keys: Keys) -> None:
        for name in keys.names():
            bound = self._one.match(name)
            if bound is None:
                continue
            tensor = keys.tensor(name, self.label)
            if tensor is None:
                continue
            if not self._axis < len(tensor.shape):
                keys.problems.append(f"{self.label}: {name!r} has no axis {self._axis}")
                continue
            count = tensor.shape[self._axis]
            if self._count not in (None, count):
                keys.problems.append(
                    f"{self.label}: {name!r} has {count} along axis {self._axis}, not {self._count}"
                )
                continue
            keys.replace(
                [name],
                {
                    self._many.format({**bound, self._over: n}): tensor.cut(
                        self._axis, n, n + 1
                    ).squeezed(self._axis)
                    for n in range(count)
                },
                self.label,
            )


class UnstackRule(StackRule):
    """One tensor in the state, many in the checkpoint: the inverse of :class:`StackRule`."""

    kind = "unstack"

    def forward(self, keys: Keys) -> None:
        self._unstack(keys)

    def backward(self, keys: Keys) -> None:
        self._stack(keys)
