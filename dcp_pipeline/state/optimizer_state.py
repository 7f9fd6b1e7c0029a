"""The state of optimizers by parameter name, and back into them.

As torch lays it out: ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``,
or flat, a key for each value. Unlike torch's, reading it changes nothing: a parameter that has no
state yet is recorded as ``{}`` and comes back without state.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_pipeline.core.errors import StateError
from dcp_pipeline.state.model_names import ModelNames

__all__ = [
    "GROUPS",
    "PARAMS",
    "STATE",
    "Grouped",
    "Parameter",
    "flat_key",
    "flattened",
    "grouped",
    "is_flat",
    "longest_name",
    "named_state",
    "owners",
]

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


@dataclass(frozen=True)
class Parameter:
    """A parameter as its optimizer knows it.

    Attributes:
        name: in the model.
        tensor: the parameter.
        optimizer: that updates it.
        group: index of its parameter group.
        index: its number in the optimizer's own state dict.
        answers: what was found out about its first step.
    """

    name: str
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer
    group: int
    index: int
    answers: dict[bool, Mapping[Any, Any] | None] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def state(self) -> Mapping[Any, Any]:
        """What the optimizer has for it; empty as long as it was not stepped."""
        found: Mapping[Any, Any] = self.optimizer.state.get(self.tensor, {})
        return found


def owners(names: ModelNames, optimizers: Iterable[torch.optim.Optimizer]) -> list[Parameter]:
    """The parameters of all optimizers, in their order.

    Raises:
        StateError: an optimizer has a parameter that is not the model's, or two have the same.
    """
    known = names.of_parameters()
    found: dict[str, Parameter] = {}
    for optimizer in optimizers:
        index = 0
        for number, group in enumerate(optimizer.param_groups):
            for tensor in group[PARAMS]:
                name = known.get(id(tensor))
                if name is None:
                    raise StateError(
                        f"{type(optimizer).__name__} has a parameter of shape"
                        f" {list(tensor.shape)} in group {number} that the model does not have:"
                        " pass the model that it trains"
                    )
                if name in found:
                    raise StateError(f"two optimizers, or two groups, have the parameter {name}")
                found[name] = Parameter(name, tensor, optimizer, number, index)
                index += 1
    return list(found.values())


def named_state(
    optimizers: Iterable[torch.optim.Optimizer],
    parameters: Iterable[Parameter],
    leaves_out_frozen: bool = False,
) -> dict[str, Any]:
    """The state of all optimizers together; nothing is changed, tensors are the optimizers' own.

    Hyperparameters that are tensors are copied: groups come in any order in a checkpoint.
    """
    by_optimizer: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        by_optimizer.setdefault(id(parameter.optimizer), []).append(parameter)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        raw = optimizer.state_dict()
        own = by_optimizer.get(id(optimizer), [])
        for parameter in own:
            found = raw[STATE].get(parameter.index)
            if found:
                state[parameter.name] = dict(found)
            elif parameter.tensor.requires_grad or not leaves_out_frozen:
                state[parameter.name] = {}
        name_of = {parameter.index: parameter.name for parameter in own}
        for group in raw[GROUPS]:
            values = {key: _copied(value) for key, value in group.items() if key != PARAMS}
            groups.append(
                values | {PARAMS: [name_of[index] for index in group[PARAMS] if index in name_of]}
            )
    return {STATE: state, GROUPS: groups}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def flat_key(*parts: object) -> str:
    """A key of the flat layout.

    >>> flat_key("state", "layer.weight", "exp_avg")
    'state.layer.weight.exp_avg'
    """
    return ".".join(map(str, parts))


def flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The flat layout: a key per value of a parameter, and per hyperparameter of a parameter.

    Groups without parameters have no place in it.
    """
    flat: dict[str, Any] = {}
    for name, state in nested[STATE].items():
        flat.update(_leaves(state, flat_key(STATE, name)))
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            flat.update(
                (flat_key(GROUPS, name, key), value)
                for key, value in group.items()
                if key != PARAMS
            )
    return flat


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for inner, child in value.items():
            yield from _leaves(child, flat_key(key, inner))
    else:
        yield key, value


@dataclass
class Grouped:
    """A state in either layout, by parameter.

    Attributes:
        state: name to state; one that had none yet has ``{}``, one of which nothing is known is
            not there.
        hyperparameters: name to those of its group.
        empty_groups: position to the hyperparameters of groups without parameters.
    """

    state: dict[str, dict[Any, Any]] = field(default_factory=dict)
    hyperparameters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    empty_groups: dict[int, Mapping[str, Any]] = field(default_factory=dict)


def is_flat(state: Mapping[str, Any]) -> bool:
    """Whether a state is in the flat layout."""
    return bool(state) and STATE not in state and GROUPS not in state


def grouped(given: Mapping[str, Any], own: Mapping[str, Mapping[Any, Any]]) -> Grouped:
    """Take a state of either layout apart; one part of it may be in the one, one in the other.

    Args:
        own: name of each parameter to the state that it has now, whose keys show how those of the
            flat layout are to be read.
    """
    result = Grouped({name: dict(state) for name, state in given.get(STATE, {}).items()})
    for position, group in enumerate(given.get(GROUPS, ())):
        values = {key: value for key, value in group.items() if key != PARAMS}
        for name in group[PARAMS]:
            if name in result.hyperparameters:
                raise StateError(f"the state has the parameter {name} in two groups")
            result.hyperparameters[name] = values
        if not group[PARAMS]:
            result.empty_groups[position] = values
    flat = {key: value for key, value in given.items() if key not in (STATE, GROUPS)}
    if flat:
        _take_flat(flat, own, result)
    return result


def _take_flat(
    given: Mapping[str, Any], own: Mapping[str, Mapping[Any, Any]], result: Grouped
) -> None:
    for key, value in given.items():
        section, _, rest = key.partition(".")
        name = longest_name(rest, own)
        if name is None:
            continue  # of another optimizer, or of another part of the model
        inner = rest[len(name) + 1 :]
        if section == GROUPS:
            result.hyperparameters[name] = {**result.hyperparameters.get(name, {}), inner: value}
            continue
        state = result.state.setdefault(name, {})
        if inner:
            _put_inside(state, inner, value, own[name])


def longest_name(rest: str, names: Container[str]) -> str | None:
    """The parameter whose name a part of a flat key begins with."""
    candidate = rest
    while candidate not in names:
        candidate, dot, _ = candidate.rpartition(".")
        if not dot:
            return None
    return candidate


def _put_inside(state: dict[Any, Any], inner: str, value: Any, like: Mapping[Any, Any]) -> None:
    """Put a value at a dotted place, with the keys that ``like`` has where it has such."""
    spelled = {str(key): key for key in like}
    for text, key in spelled.items():
        if inner == text:
            state[key] = value
            return
        if inner.startswith(f"{text}.") and isinstance(like[key], Mapping):
            below = state.setdefault(key, {})
            _put_inside(below, inner[len(text) + 1 :], value, like[key])
            return
    first, dot, rest = inner.partition(".")
    if not dot:
        state[first] = value
        return
    _put_inside(state.setdefault(first, {}), rest, value, {})
