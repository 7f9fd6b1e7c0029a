"""Puts values at their places in a nested state; and takes that back.

The other way round than :mod:`dcp_pipeline.state.flatten`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from dcp_pipeline.core.errors import CorruptCheckpointError, RollbackFailedError, list_some
from dcp_pipeline.core.path import Component, Index, Path, dotted
from dcp_pipeline.state.flatten import FlatState

__all__ = ["Undo", "assign", "delete_at", "get_at", "put_at", "take_out"]


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


def get_at(tree: Any, path: Path) -> Any:
    """What stands at ``path`` in nested mappings and lists, ``None`` where nothing is."""
    for component in path:
        if not isinstance(tree, list | tuple if isinstance(component, Index) else Mapping):
            return None
        tree = _get(tree, component)
    return tree


def put_at(tree: Any, path: Path, value: Any) -> None:
    """Put a value at ``path`` in nested mappings and lists; those that are not there are made."""
    undo = Undo()
    for component, below in itertools.pairwise(path):
        child = _get(tree, component)
        if child is None:
            child = [] if isinstance(below, Index) else {}
            _set(tree, component, child, undo)
        tree = child
    _set(tree, path[-1], value, undo)


def delete_at(tree: Any, path: Path) -> None:
    """Take out what stands at ``path``, if anything does."""
    container, last = get_at(tree, path[:-1]), path[-1]
    if isinstance(last, Index):
        if isinstance(container, list) and last.position < len(container):
            del container[last.position]
    elif isinstance(container, MutableMapping):
        container.pop(last, None)


def take_out(flat: FlatState, undo: Undo) -> None:
    """Remove what the checkpoint says is not there."""
    states = flat.states()
    for path in sorted(flat.removed, key=_position, reverse=True):
        _remove(_at(path[:-1], flat, states), path[-1], undo)


def _position(path: Path) -> int:
    last = path[-1]
    return last.position if isinstance(last, Index) else 0


def _at(path: Path, flat: FlatState, states: Mapping[Path, Any]) -> Any:
    """What stands at ``path``, objects replaced by their states."""
    value = states.get((), flat.root)
    for depth, component in enumerate(path, 1):
        value = states[path[:depth]] if path[:depth] in states else _get(value, component)
    return value


def _remove(container: Any, component: Component, undo: Undo) -> None:
    if isinstance(component, Index):
        old = container.pop()
        undo.steps.append(lambda: container.append(old))
    else:
        old = container.pop(component)
        undo.steps.append(lambda: container.__setitem__(component, old))


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
