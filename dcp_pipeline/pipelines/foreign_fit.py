"""Parts of a state that adapt to a checkpoint, for a planner of DCP's, which knows no such."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping
from typing import Any

from dcp_pipeline.core.path import Component, Index, Path, is_prefix
from dcp_pipeline.layout.dcp_metadata import keys_of
from dcp_pipeline.state.fitting import Fit, FittingState, Stored
from dcp_pipeline.types.dcp import Metadata

__all__ = ["fit_to"]


def fit_to(collected: MutableMapping[str, Any], metadata: Metadata) -> None:
    """Put plain mappings, as they fit what is stored, in the place of parts that adapt."""
    found = dict(_parts(collected, ()))
    if not found:
        return
    keys = keys_of(metadata)
    for path, part in found.items():
        depth = len(path)
        below = {spec.path[depth:]: spec for spec in keys if is_prefix(path, spec.path)}
        _set(collected, path, _fitted(part, part.fit(Stored(below))))


def _parts(value: Any, path: Path) -> Any:
    if isinstance(value, FittingState):
        yield path, value
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _parts(child, (*path, key))


def _fitted(part: FittingState, fit: Fit) -> Any:
    """What the part looks like once it is changed; containers are copies, tensors are not."""
    tree = _copied(part)
    gone = [*fit.dropped, *fit.removed, *fit.put]
    for path in sorted(gone, key=lambda path: str(path[-1]), reverse=True):
        _delete(tree, path)
    for here, there in fit.renamed.items():
        _set(tree, there, _get(tree, here))
        _delete(tree, here)
    for path, value in {**fit.put, **fit.made}.items():
        _set(tree, path, value)
    return tree


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(child) for key, child in value.items()}
    return [_copied(child) for child in value] if isinstance(value, list) else value


def _key(component: Component) -> Any:
    return component.position if isinstance(component, Index) else component


def _get(tree: Any, path: Path) -> Any:
    for component in path:
        tree = tree[_key(component)]
    return tree


def _delete(tree: Any, path: Path) -> None:
    container = _get(tree, path[:-1]) if _has(tree, path) else None
    if container is not None:
        del container[_key(path[-1])]


def _has(tree: Any, path: Path) -> bool:
    try:
        _get(tree, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _set(tree: Any, path: Path, value: Any) -> None:
    for component, below in itertools.pairwise(path):
        fresh: Any = [] if isinstance(below, Index) else {}
        tree = _at_or_made(tree, _key(component), fresh)
    key = _key(path[-1])
    if isinstance(tree, list):
        tree.extend([None] * (key + 1 - len(tree)))
    tree[key] = value


def _at_or_made(tree: Any, key: Any, fresh: Any) -> Any:
    if isinstance(tree, list):
        tree.extend([None] * (key + 1 - len(tree)))
        if tree[key] is None:
            tree[key] = fresh
    elif key not in tree:
        tree[key] = fresh
    return tree[key]
