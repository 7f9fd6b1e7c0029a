"""Takes a nested state apart into leaves, and puts values back into it.

Names follow DCP's flattening (torch 2.4 and newer): mappings are always entered, lists where they
hold a tensor or a mapping. Beyond DCP, tuples that hold tensors are entered, ``Stateful`` objects
are expanded at any depth, keys keep their types, and empty mappings are kept.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    RollbackFailedError,
    UnsupportedLeafError,
    list_some,
)
from dcp_pipeline.core.path import Component, Index, Path, dotted
from dcp_pipeline.core.table import Kind
from dcp_pipeline.types.dcp import Stateful

__all__ = ["Expanded", "FlatState", "Leaf", "assign", "flatten"]

MAX_DEPTH = 200
_KEY_BITS = 1024


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that is stored under one key."""

    path: Path
    kind: Kind
    value: Any


@dataclass(frozen=True, slots=True)
class Expanded:
    """A ``Stateful`` object and the state that it gave."""

    path: Path
    owner: Stateful
    state: Any


@dataclass(frozen=True)
class FlatState:
    """A state taken apart.

    Attributes:
        root: the state, with each ``Stateful`` object still in its place.
        leaves: in the order of the state.
        empty: path and ``dict``, ``list`` or ``tuple`` of mappings that hold nothing.
        expanded: ``Stateful`` objects, the outer before the inner.
    """

    root: Any
    leaves: list[Leaf] = field(default_factory=list)
    empty: list[tuple[Path, str]] = field(default_factory=list)
    expanded: list[Expanded] = field(default_factory=list)

    def states(self) -> dict[Path, Any]:
        """What stands at the path of each ``Stateful`` object once expanded."""
        return {entry.path: entry.state for entry in self.expanded}


def flatten(state: Any) -> FlatState:
    """Take ``state`` apart.

    Raises:
        UnsupportedLeafError: keys that no checkpoint can hold, or a state that contains itself;
            the message names all of them.
    """
    flat = FlatState(state)
    problems: list[str] = []
    _walk(state, (), flat, problems, [])
    if problems:
        raise UnsupportedLeafError(f"the state cannot be stored: {list_some(problems)}")
    return flat


def is_tensor_like(value: object) -> bool:
    """Whether ``value`` is stored in chunks: a tensor, or what follows DCP's protocol for one."""
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "__create_chunk_list__") and not isinstance(value, type)
    )


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object that saves and restores itself."""
    return isinstance(value, Stateful) and not isinstance(value, (type, torch.Tensor))


def _walk(value: Any, path: Path, flat: FlatState, problems: list[str], above: list[int]) -> None:
    try:
        kind = _leaf_kind(value)
    except RecursionError:
        problems.append(f"{dotted(path)!r} contains itself, or is nested too deeply")
        return
    if kind is not None:
        flat.leaves.append(Leaf(path, kind, value))
        return
    if id(value) in above or len(above) > MAX_DEPTH:
        problems.append(f"{dotted(path)!r} contains itself")
        return
    above.append(id(value))
    if is_stateful(value):
        state = value.state_dict()
        flat.expanded.append(Expanded(path, value, state))
        _walk(state, path, flat, problems, above)
    elif not len(value):
        flat.empty.append((path, "dict"))
    else:
        for component, child in _children(value):
            if isinstance(component, _BadKey):
                problems.append(f"{dotted(path)!r} has a key of type {component.type_name}")
            else:
                _walk(child, (*path, component), flat, problems, above)
    above.pop()


def _leaf_kind(value: object) -> Kind | None:
    """The kind of a leaf, ``None`` for what is entered."""
    if is_tensor_like(value):
        return Kind.TENSOR
    if isinstance(value, np.ndarray):
        return Kind.ARRAY
    if isinstance(value, np.generic):
        return Kind.SCALAR
    if isinstance(value, io.BytesIO):
        return Kind.STREAM
    if isinstance(value, Mapping) or is_stateful(value):
        return None
    if isinstance(value, list):
        return None if any(map(_holds_items, value)) else Kind.VALUE
    if isinstance(value, tuple):
        return None if any(map(_holds_tensors, value)) else Kind.VALUE
    return Kind.VALUE


def _holds_items(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list):
        return any(map(_holds_items, value))
    return _holds_tensors(value)


def _holds_tensors(value: object) -> bool:
    if is_tensor_like(value) or isinstance(value, np.ndarray) or is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))


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


@dataclass(frozen=True)
class Undo:
    """Steps that take an assignment back, the last one first."""

    steps: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """Take everything back.

        Raises:
            RollbackFailedError: a container refused; the rest was taken back all the same.
        """
        failed = []
        for step in reversed(self.steps):
            try:
                step()
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
        self.steps.clear()
        if failed:
            raise RollbackFailedError(f"containers could not be restored: {list_some(failed)}")


def assign(flat: FlatState, values: Mapping[Path, Any], undo: Undo) -> None:
    """Put ``values`` at their paths, in place; tuples on the way are made anew.

    Paths that the state does not have yet are created below containers that it has.

    Raises:
        CorruptCheckpointError: the paths contradict one another, or the containers.
    """
    tree: dict[Component, Any] = {}
    for path, value in values.items():
        if not path:
            continue  # the whole state is empty, and there is nothing to put into it
        node = tree
        for component in path[:-1]:
            node = node.setdefault(component, {})
            if isinstance(node, _Value):
                raise CorruptCheckpointError(f"{dotted(path)} lies inside another value")
        if isinstance(node.get(path[-1]), dict):
            raise CorruptCheckpointError(f"other values lie inside {dotted(path)}")
        node[path[-1]] = _Value(value)
    states = flat.states()
    _assign_below(states.get((), flat.root), (), tree, states, undo)


@dataclass(frozen=True)
class _Value:
    value: Any


def _assign_below(
    container: Any, path: Path, tree: dict[Component, Any], states: dict[Path, Any], undo: Undo
) -> Any:
    """Put the values of ``tree`` into ``container``; what stands in its place afterwards."""
    changed: dict[Component, Any] = {}
    is_list = isinstance(container, MutableSequence | tuple)
    if any(isinstance(component, Index) != is_list for component in tree):
        raise CorruptCheckpointError(
            f"the checkpoint has positions and names at {dotted(path)!r}, where there is a"
            f" {type(container).__name__}"
        )
    for component, node in tree.items():
        below = (*path, component)
        if isinstance(node, _Value):
            changed[component] = node.value
            continue
        before = _get(container, component)
        if below in states:
            _assign_below(states[below], below, node, states, undo)
            continue
        child = _container_for(node) if before is None else before
        replaced = _assign_below(child, below, node, states, undo)
        if replaced is not before:
            changed[component] = replaced
    if isinstance(container, tuple):
        return _changed_tuple(container, changed)
    for component, value in changed.items():
        _set(container, component, value, undo)
    return container


def _get(container: Any, component: Component) -> Any:
    """What is at ``component``, ``None`` where nothing is."""
    if isinstance(component, Index):
        inside = component.position < len(container)
        return container[component.position] if inside else None
    return container.get(component)


def _set(container: Any, component: Component, value: Any, undo: Undo) -> None:
    if isinstance(component, Index):
        _set_item(container, component.position, value, undo)
        return
    if component in container:
        old = container[component]
        undo.steps.append(lambda: container.__setitem__(component, old))
    else:
        undo.steps.append(lambda: container.pop(component, None))
    container[component] = value


def _set_item(container: MutableSequence[Any], position: int, value: Any, undo: Undo) -> None:
    if position < len(container):
        old = container[position]
        undo.steps.append(lambda: container.__setitem__(position, old))
        container[position] = value
        return
    before = len(container)
    undo.steps.append(lambda: container.__delitem__(slice(before, None)))
    container.extend([None] * (position - before))
    container.append(value)


def _changed_tuple(container: tuple[Any, ...], changed: dict[Component, Any]) -> tuple[Any, ...]:
    if not changed:
        return container
    items = list(container)
    for component, value in changed.items():
        position = component.position if isinstance(component, Index) else int(str(component))
        items.extend([None] * (position + 1 - len(items)))
        items[position] = value
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return type(container)(items)


def _container_for(node: dict[Component, Any]) -> MutableMapping[Any, Any] | list[Any] | tuple[()]:
    first = next(iter(node))
    if not isinstance(first, Index):
        return {}
    return () if first.is_tuple else []
