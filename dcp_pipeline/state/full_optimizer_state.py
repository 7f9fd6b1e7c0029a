"""Optimizer states whose tensors are whole, and the way back to shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.full_state import Form, Target, gathered, offloaded, sent_from_first, spread
from dcp_pipeline.state.optimizer_state import GROUPS, STATE, Parameter, longest_name

__all__ = ["sharded_state", "whole_state"]

Place = tuple[Any, ...]


def whole_state(state: Mapping[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """A state with whole tensors, or in host memory, as ``options`` say."""
    leaves = dict(_leaves(state, ()))
    if not options.full_state_dict:
        return _tree({path: offloaded(value) for path, value in leaves.items()})
    return _tree(gathered(leaves, options.cpu_offload))


def sharded_state(
    full: Mapping[str, Any], parameters: Sequence[Parameter], options: StateDictOptions
) -> dict[str, Any]:
    """This rank's shards of a full state; rank 0's, where ``options`` say so."""
    by_name = {parameter.name: parameter for parameter in parameters}

    def find(place: Place, form: Form) -> Target:
        name, inner = _name_and_rest(place, by_name)
        if name is None:
            return Target(is_here=place[:1] == (GROUPS,))
        return _target(by_name[name], inner, form)

    def check(places: Collection[Place]) -> None:
        return None  # what is missing is said when the optimizers are given their parts

    leaves = dict(_leaves(full, ()))
    if options.broadcast_from_rank0 and dist.is_initialized():
        return _tree(sent_from_first(leaves, find, check))
    return _tree(spread(leaves, find, check))


def _target(parameter: Parameter, inner: Place, form: Form) -> Target:
    """A tensor that is sharded as the optimizer has the one at ``inner``."""
    tensor = parameter.tensor
    if form.shape == ():
        return Target()
    own = _at(parameter.state, inner, form)
    if own is not None:
        return Target(own, is_own=True)
    if form.shape == tuple(tensor.shape):
        return Target(tensor)
    if not isinstance(tensor, DTensor):
        return Target()
    return Target(_at(state_after_a_step(parameter, is_real=True) or {}, inner, form))


def _at(state: Mapping[Any, Any], inner: Place, form: Form) -> torch.Tensor | None:
    value: Any = state
    for key in inner:
        value = value.get(key) if isinstance(value, Mapping) else None
    is_such = isinstance(value, torch.Tensor) and tuple(value.shape) == form.shape
    return value if is_such else None


def _name_and_rest(place: Place, names: Mapping[str, Parameter]) -> tuple[str | None, Place]:
    if place[:1] == (STATE,) and len(place) > 1:
        return (place[1] if place[1] in names else None), place[2:]
    section, _, rest = ".".join(map(str, place[:1])).partition(".")
    name = longest_name(rest, names) if section == STATE else None
    return name, tuple(rest[len(name) + 1 :].split(".")) if name else ()


def _leaves(value: Any, place: Place) -> Any:
    """Place and value of everything in nested mappings, and in lists of groups."""
    if isinstance(value, Mapping) and value:
        for key, child in value.items():
            yield from _leaves(child, (*place, key))
    elif isinstance(value, list) and place == (GROUPS,):
        for position, child in enumerate(value):
            yield from _leaves(child, (*place, _At(position)))
    else:
        yield place, value


class _At(int):
    """A position in a list."""


def _tree(leaves: Mapping[Place, Any]) -> dict[str, Any]:
    tree: dict[Any, Any] = {}
    for place, value in leaves.items():
        if not place:
            continue  # nothing at all
        node = tree
        for key in place[:-1]:
            node = node.setdefault(key, {})
        node[place[-1]] = value
    if any(isinstance(key, _At) for key in tree.get(GROUPS, ())):
        tree[GROUPS] = [tree[GROUPS][position] for position in sorted(tree[GROUPS])]
    return tree
