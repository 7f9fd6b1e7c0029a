"""What the files of DeepSpeed's ranks say: flat tensors, states of the optimizer, shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, Final

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.path import Path
from dcp_pipeline.formats.torch_tree import TorchTree
from dcp_pipeline.formats.torch_zip import Rebuilt
from dcp_pipeline.layout.foreign.building import Building, chunk_of, opened_tree
from dcp_pipeline.types.dtypes import dtype_name

__all__ = ["CLASSES", "Flat", "Line", "Rank", "flat_of", "names_of", "optim_states", "shapes_of"]

CLASSES: Final = ("argparse", "deepspeed", "numpy", "torch.optim", "types", "enum")
"""Modules whose objects DeepSpeed leaves beside its tensors."""

_MOST_RANKS: Final = 1 << 16


@dataclass(frozen=True)
class Flat:
    """A flat tensor of one rank, or a part of it.

    Attributes:
        file: number of it.
        dtype: name of the element type.
        begin: where its elements start, bytes.
        count: how many there are.
    """

    file: int
    dtype: str
    begin: int
    count: int


@dataclass(frozen=True)
class Rank:
    """What is needed of a file ``*_optim_states.pt``.

    Attributes:
        stage: of ZeRO.
        count: ranks among which groups are divided.
        flat: of each state of each group: ``fp32`` and the optimizer's own.
        values: of each group, what is no flat tensor (``step``).
    """

    stage: int
    count: int
    flat: list[dict[str, Flat]]
    values: list[dict[str, Any]]


class Line:
    """Flat tensors that lie end to end."""

    def __init__(self, parts: Sequence[Flat]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.count for part in parts))

    @property
    def count(self) -> int:
        """Elements of all."""
        return self._ends[-1] if self._ends else 0

    def part_at(self, at: int) -> int:
        """The number of the part that has an element, or would have the one behind the last."""
        return min(bisect_right(self._ends, at), len(self._ends) - 1)

    def cut(self, first: int, count: int) -> list[Flat]:
        """The elements from ``first`` on."""
        found = []
        for number in range(self.part_at(first), len(self._parts)) if count > 0 else ():
            part = self._parts[number]
            start = self._ends[number] - part.count
            low, high = max(first - start, 0), min(first + count - start, part.count)
            if low >= high:
                break
            begin = part.begin + low * ITEM_SIZES[part.dtype]
            found.append(Flat(part.file, part.dtype, begin, high - low))
        return found


def optim_states(building: Building, name: str, prefix: Path | None = None) -> Rank:
    """Look into a file ``*_optim_states.pt``.

    Args:
        prefix: of the keys under which the optimizer's ``param_groups`` are added; ``None`` for
            not at all.
    """
    with opened_tree(building.directory, name, CLASSES) as tree:
        root = tree.root
        states = root.get("optimizer_state_dict") if isinstance(root, dict) else None
        if not isinstance(states, dict) or "zero_stage" not in states:
            raise FormatError("it has no optimizer_state_dict of ZeRO")
        stage, count = states["zero_stage"], states.get("partition_count")
        counts = count if isinstance(count, list) else [count]
        if any(type(one) is not int or not 0 < one <= _MOST_RANKS for one in counts) or not counts:
            raise FormatError(f"partition_count is {str(count)[:80]}")
        if type(stage) is not int or not 1 <= stage <= 3:
            raise FormatError(f"zero_stage is {str(stage)[:80]}, expected 1, 2 or 3")
        flat_key = "single_partition_of_fp32_groups" if stage < 3 else "fp32_flat_groups"
        base_key = "base_optimizer_state" if stage < 3 else "optimizer_state_dict"
        groups = states.get(flat_key)
        if not isinstance(groups, list):
            raise FormatError(f"it has no {flat_key}")
        file = building.file(name)
        flat, values = [], []
        for number, group in enumerate(groups):
            weights = flat_of(tree, group, file, f"{flat_key}[{number}]")
            tensors, others = _states_of(tree, states.get(base_key), number, file)
            flat.append({"fp32": weights, **tensors})
            values.append(others)
        base = states.get(base_key)
        if prefix is not None and isinstance(base, dict):
            path = (*prefix, "optimizer", "param_groups")
            building.leaves(tree, base.get("param_groups"), file, path)
        return Rank(stage, max(counts), flat, values)


def _states_of(
    tree: TorchTree, base: Any, number: int, file: int
) -> tuple[dict[str, Flat], dict[str, Any]]:
    """The optimizer's own state of a group: what is flat, and what is a single value."""
    states = base.get("state") if isinstance(base, dict) else base
    of_group: Any = None
    if isinstance(states, dict):
        of_group = states.get(number)
    elif isinstance(states, list) and number < len(states):
        of_group = states[number]
    flat: dict[str, Flat] = {}
    others: dict[str, Any] = {}
    for state, value in (of_group if isinstance(of_group, dict) else {}).items():
        if type(state) is not str or state == "fp32":
            raise FormatError(f"a state of the optimizer is called {str(state)[:80]!r}")
        if type(value) is not Rebuilt:
            if value is None or type(value) in (bool, int, float, str):
                others[state] = value
            continue
        if len(value.sizes) == 1:
            flat[state] = flat_of(tree, value, file, state)
        elif not value.sizes:
            others[state] = flat_of(tree, value, file, state)
    return flat, others


def flat_of(tree: TorchTree, tensor: Any, file: int, place: str) -> Flat:
    """A dense tensor of a file, whatever its shape."""
    if type(tensor) is not Rebuilt:
        raise FormatError(f"{place!r} is a {type(tensor).__name__}, expected a tensor")
    stored = tree.locate(tensor, place)
    dtype = dtype_name(stored.dtype)
    if dtype is None or not stored.is_row_major:
        raise FormatError(f"{place!r} is no dense tensor of a dtype that is read")
    chunk = chunk_of(stored, dtype, file)
    return Flat(file, dtype, chunk.begin, prod(stored.sizes))


def shapes_of(groups: Any) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of the parameters of each group, in their order."""
    listed = [groups] if isinstance(groups, dict) else groups
    if not isinstance(listed, list) or not all(isinstance(group, dict) for group in listed):
        raise FormatError("param_shapes are no mappings of names to shapes")
    found: list[dict[str, tuple[int, ...]]] = []
    for group in listed:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in group.items():
            numbers = tuple(shape) if isinstance(shape, tuple | list) else None
            if type(name) is not str or numbers is None:
                raise FormatError(f"param_shapes have {str(name)[:80]!r} of {str(shape)[:80]}")
            if any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
                raise FormatError(f"{name[:80]!r} has the shape {str(shape)[:80]}")
            if prod(n or 1 for n in numbers) >= 1 << 60 or len(numbers) > 64:
                raise UnsafeCheckpointError(f"{name[:80]!r} has the shape {str(shape)[:80]}")
            shapes[name] = numbers
        found.append(shapes)
    return found


def names_of(names: Any) -> list[str]:
    """``names`` if they are names."""
    if not isinstance(names, list | tuple) or any(type(name) is not str for name in names):
        raise FormatError(f"{str(names)[:80]} where names were expected")
    return list(names)
