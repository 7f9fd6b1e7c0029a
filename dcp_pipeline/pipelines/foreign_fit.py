"""Parts of a state that adapt to a checkpoint, for a planner of DCP's, which knows no such."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from dcp_pipeline.core.path import Index, Path, is_prefix
from dcp_pipeline.layout.dcp_metadata import keys_of
from dcp_pipeline.state.assigning import delete_at, get_at, put_at
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
        put_at(collected, path, _fitted(part, part.fit(Stored(below))))


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
    # What is replaced is not taken out: the rest of a list would move up.
    gone = [path for path in gone if path not in fit.made and path not in fit.put]
    for path in sorted(gone, key=_position, reverse=True):
        delete_at(tree, path)
    for here, there in fit.renamed.items():
        put_at(tree, there, get_at(tree, here))
        delete_at(tree, here)
    for path, value in {**fit.put, **fit.made}.items():
        put_at(tree, path, value)
    return tree


def _position(path: Path) -> int:
    last = path[-1]
    return last.position if isinstance(last, Index) else -1


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(child) for key, child in value.items()}
    return [_copied(child) for child in value] if isinstance(value, list) else value
