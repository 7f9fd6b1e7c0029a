"""Puts a stored value in the place of another one, whatever that one looks like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

import numpy as np
import torch

from dcp_pipeline.state.leaf_kinds import is_stateful
from dcp_pipeline.state.modules import give_state
from dcp_pipeline.types.dcp import Stateful

__all__ = ["copied", "placed", "with_objects"]

Step = Callable[[], object]
Load = Callable[[Stateful, Any], None]


def placed(
    current: Any,
    saved: Any,
    undo: Callable[[Step], None] = lambda step: None,
    load: Load = give_state,
) -> Any:
    """Make ``current`` what ``saved`` is; what stands in its place afterwards.

    Objects with ``load_state_dict`` take their part of ``saved``. Dicts and lists stay the same
    objects, and so do tensors and arrays of the same shape and dtype; anything else is replaced.

    Args:
        undo: is given steps that take back what was changed in place, to be run last to first.
        load: lets an object take its state.

    Example:
        >>> here = {"weight": torch.zeros(2), "old": 1}
        >>> placed(here, {"weight": torch.ones(2), "new": [2]}) is here, here
        (True, {'weight': tensor([1., 1.]), 'new': [2]})
    """
    if is_stateful(current):
        load(current, saved)
        return current
    into = partial(placed, undo=undo, load=load)
    if isinstance(current, MutableMapping) and isinstance(saved, Mapping):
        new = {key: into(current.get(key), value) for key, value in saved.items()}
        undo(partial(_refill, current, dict(current)))
        _refill(current, new)
        return current
    if isinstance(current, list) and isinstance(saved, list):
        items = [into(old, value) for old, value in _paired(current, saved)]
        undo(partial(current.__setitem__, slice(None), list(current)))
        current[:] = items
        return current
    if isinstance(current, tuple) and isinstance(saved, tuple):
        return _tuple_like(current, [into(old, value) for old, value in _paired(current, saved)])
    if isinstance(current, torch.Tensor) and isinstance(saved, torch.Tensor):
        return _placed_tensor(current, saved, undo)
    if _can_fill_array(current, saved):
        undo(partial(np.copyto, current, current.copy()))
        np.copyto(current, saved)
        return current
    return saved


def with_objects(state: Any, saved: Any, load: Load) -> Any:
    """``saved`` with the objects of ``state`` in their places, each of which has taken its part.

    An object whose state holds others is given these, not their states. Nothing else is changed.
    """
    if is_stateful(state):
        load(state, saved)
        return state
    into = partial(with_objects, load=load)
    if isinstance(state, Mapping) and isinstance(saved, Mapping):
        return {key: into(state.get(key), value) for key, value in saved.items()}
    if isinstance(state, list) and isinstance(saved, list):
        return [into(old, value) for old, value in _paired(state, saved)]
    if isinstance(state, tuple) and isinstance(saved, tuple):
        return _tuple_like(state, [into(old, value) for old, value in _paired(state, saved)])
    return saved


def copied(value: Any) -> Any:
    """A copy of a state that shares no memory with it; tensors keep their devices."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(child) for key, child in value.items()}
    if isinstance(value, list):
        return [copied(child) for child in value]
    if isinstance(value, tuple):
        return _tuple_like(value, [copied(child) for child in value])
    # An object within the state is copied by its own state.
    return value if is_stateful(value) else copy.deepcopy(value)


def _refill(mapping: MutableMapping[Any, Any], items: Mapping[Any, Any]) -> None:
    mapping.clear()
    mapping.update(items)


def _paired(current: Any, saved: Any) -> list[tuple[Any, Any]]:
    return [
        (current[position] if position < len(current) else None, value)
        for position, value in enumerate(saved)
    ]


def _tuple_like(current: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    if hasattr(current, "_fields"):
        return type(current)(*items) if len(items) == len(current) else tuple(items)
    return tuple(items)


def _placed_tensor(
    current: torch.Tensor, saved: torch.Tensor, undo: Callable[[Step], None]
) -> torch.Tensor:
    if current.device.type == "meta":
        return saved
    is_alike = (current.shape, current.dtype) == (saved.shape, saved.dtype)
    is_expanded = any(
        extent > 1 and stride == 0
        for extent, stride in zip(current.shape, current.stride(), strict=True)
    )
    if not is_alike or is_expanded:
        return saved.to(current.device)
    place = current.detach()
    undo(partial(place.copy_, place.clone()))
    place.copy_(saved)
    return current


def _can_fill_array(current: Any, saved: Any) -> bool:
    return (
        isinstance(current, np.ndarray)
        and isinstance(saved, np.ndarray)
        and (current.shape, current.dtype) == (saved.shape, saved.dtype)
        and current.flags.writeable
    )
