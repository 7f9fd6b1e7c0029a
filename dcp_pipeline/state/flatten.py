"""Takes a nested state apart into leaves; :mod:`dcp_pipeline.state.assigning` puts values back.

Names follow DCP's flattening (torch 2.4 and newer): mappings are always entered, lists where they
hold a tensor or a mapping. Beyond DCP, tuples that hold tensors are entered, ``Stateful`` objects
are expanded at any depth, keys keep their types, and empty mappings are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_pipeline.core.errors import UnsupportedLeafError, list_some
from dcp_pipeline.core.path import Component, Index, Path, dotted
from dcp_pipeline.core.table import Kind
from dcp_pipeline.state.fitting import Fit, FittingState
from dcp_pipeline.state.leaf_kinds import is_stateful, is_wrapper, leaf_kind, parts_of
from dcp_pipeline.state.modules import state_of
from dcp_pipeline.state.rank_local import RankLocal, rank_key
from dcp_pipeline.types.dcp import Stateful

__all__ = ["Expanded", "FlatState", "Leaf", "Local", "flatten", "is_stateful"]

MAX_DEPTH = 200
_KEY_BITS = 1024


@dataclass(slots=True)
class Leaf:
    """A value that is stored under one key; not frozen for the reason of ``types/entries.py``.

    Attributes:
        source: where a checkpoint has it, if not at ``path``.
        is_made: whether it does not stand in the state yet.
    """

    path: Path
    kind: Kind
    value: Any
    source: Path | None = None
    is_made: bool = False


@dataclass(frozen=True, slots=True)
class Expanded:
    """A ``Stateful`` object and the state that it gave."""

    path: Path
    owner: Stateful
    state: Any


@dataclass(frozen=True, slots=True)
class Local:
    """A :class:`RankLocal` and the rank that it stands on.

    Attributes:
        path: where it lies in the state.
        key: names this rank's value below ``path``.
    """

    path: Path
    owner: RankLocal
    key: str

    @property
    def inner(self) -> Path:
        """Where this rank's value lies."""
        return (*self.path, self.key)


@dataclass(frozen=True)
class FlatState:
    """A state taken apart.

    Attributes:
        root: the state, with each ``Stateful`` object still in its place.
        rank, world_size: whose state it is.
        leaves: in the order of the state.
        empty: path and ``dict``, ``list`` or ``tuple`` of mappings that hold nothing.
        expanded: ``Stateful`` objects, the outer before the inner.
        locals: values of this rank alone; what they hold is among the leaves, too.
        fitting: path and container of what adapts to a checkpoint.
        put: what a load puts somewhere without reading it.
        removed: what a load takes out of its mapping or list.
    """

    root: Any
    rank: int = 0
    world_size: int = 1
    leaves: list[Leaf] = field(default_factory=list)
    empty: list[tuple[Path, str]] = field(default_factory=list)
    expanded: list[Expanded] = field(default_factory=list)
    locals: dict[Path, Local] = field(default_factory=dict)
    fitting: list[tuple[Path, FittingState]] = field(default_factory=list)
    put: dict[Path, Any] = field(default_factory=dict)
    removed: list[Path] = field(default_factory=list)
    _depths: set[int] = field(default_factory=set)

    def states(self) -> dict[Path, Any]:
        """What stands at the path of each ``Stateful`` object once expanded."""
        return {entry.path: entry.state for entry in self.expanded}

    def local_at(self, path: Path) -> Local | None:
        """The value of this rank alone that ``path`` lies in, if any."""
        for depth in self._depths:
            local = self.locals.get(path[:depth]) if depth < len(path) else None
            if local is not None:
                return local
        return None

    def fit(self, path: Path, fit: Fit) -> None:
        """Change the leaves below ``path`` to what a checkpoint has."""
        gone = (*fit.dropped, *fit.put, *fit.removed)
        left_out = {(*path, *below) for below in gone}
        renamed = {(*path, *here): (*path, *there) for here, there in fit.renamed.items()}
        leaves = [leaf for leaf in self.leaves if not _is_within(leaf.path, left_out)]
        for leaf in leaves:
            leaf.source = renamed.get(leaf.path, leaf.source)
        for below, value in fit.made.items():
            if is_wrapper(value):
                # Its parts are read into where they are, and it is put there as it is.
                self.put[(*path, *below)] = value
                inside = flatten(parts_of(value), self.rank, self.world_size).leaves
                leaves += [
                    Leaf((*path, *below, *leaf.path), leaf.kind, leaf.value) for leaf in inside
                ]
                continue
            kind = Kind.VALUE if value is None else leaf_kind(value) or Kind.VALUE
            leaves.append(Leaf((*path, *below), kind, value, is_made=True))
        self.leaves[:] = leaves
        made_in = {(*path, *below[:depth]) for below in fit.made for depth in range(len(below))}
        self.empty[:] = [
            entry
            for entry in self.empty
            if entry[0] not in made_in and not _is_within(entry[0], left_out)
        ]
        self.put.update({(*path, *below): value for below, value in fit.put.items()})
        self.removed.extend((*path, *below) for below in fit.removed)

    def add_local(self, path: Path, owner: RankLocal) -> Local:
        """Note a value of this rank alone."""
        local = Local(path, owner, rank_key(self.rank, self.world_size))
        self.locals[path] = local
        self._depths.add(len(path))
        return local


def _is_within(path: Path, places: set[Path]) -> bool:
    return bool(places) and any(path[:depth] in places for depth in range(len(path) + 1))


def flatten(state: Any, rank: int = 0, world_size: int = 1) -> FlatState:
    """Take ``state`` apart, which is that of one rank among several.

    Raises:
        UnsupportedLeafError: keys that no checkpoint can hold, or a state that contains itself;
            the message names all of them.
    """
    flat = FlatState(state, rank, world_size)
    problems: list[str] = []
    _walk(state, (), flat, problems, [])
    if problems:
        raise UnsupportedLeafError(f"the state cannot be stored: {list_some(problems)}")
    return flat


def _walk(value: Any, path: Path, flat: FlatState, problems: list[str], above: list[int]) -> None:
    try:
        kind = leaf_kind(value)
    except RecursionError:
        problems.append(f"{dotted(path)!r} contains itself, or is nested too deeply")
        return
    if is_wrapper(value):
        for name, part in parts_of(value).items():
            _walk(part, (*path, name), flat, problems, above)
        return
    if kind is not None:
        flat.leaves.append(Leaf(path, kind, value))
        return
    if id(value) in above or len(above) > MAX_DEPTH:
        problems.append(f"{dotted(path)!r} contains itself")
        return
    above.append(id(value))
    if isinstance(value, FittingState):
        flat.fitting.append((path, value))
    if isinstance(value, RankLocal):
        if flat.local_at(path) is not None:
            problems.append(f"{dotted(path)!r} is a RankLocal inside another one")
        else:
            local = flat.add_local(path, value)
            _walk(value.value, local.inner, flat, problems, above)
    elif is_stateful(value):
        state = state_of(value)
        flat.expanded.append(Expanded(path, value, state))
        _walk(state, path, flat, problems, above)
    elif not len(value):
        flat.empty.append((path, "dict"))
    else:
        for component, child in _children(value):
            if type(child) is torch.Tensor and type(component) is str:
                # Most leaves, without the questions that others are asked.
                flat.leaves.append(Leaf((*path, component), Kind.TENSOR, child))
            elif isinstance(component, _BadKey):
                problems.append(f"{dotted(path)!r} has a key of type {component.type_name}")
            else:
                _walk(child, (*path, component), flat, problems, above)
    above.pop()


@dataclass(frozen=True)
class _BadKey:
    type_name: str


def _children(value: Any) -> Iterator[tuple[Component | _BadKey, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            plain = key is None or isinstance(key, (str, int, float))
            if isinstance(key, int) and key.bit_length() > _KEY_BITS:
                plain = False
            yield (key if plain else _BadKey(type(key).__name__)), child
    else:
        is_tuple = isinstance(value, tuple)
        for position, child in enumerate(value):
            yield Index(position, is_tuple), child
