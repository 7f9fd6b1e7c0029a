"""Puts a state that is keyed by parameter name into the optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcp_pipeline.core.errors import MissingKeyError, StateError, list_some
from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.optimizer_state import GROUPS, PARAMS, STATE, Grouped, Parameter

__all__ = ["put_into_optimizers"]


def put_into_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[Parameter],
    given: Grouped,
    is_strict: bool,
) -> None:
    """Hand each optimizer its part, through its own ``load_state_dict``.

    Raises:
        MissingKeyError: nothing is said of a parameter that has state once it is stepped.
        StateError: parameters of one group were in groups that differ.
    """
    if is_strict:
        _check_complete(parameters, given)
    parts = [_part(optimizer, parameters, given) for optimizer in optimizers]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.load_state_dict(part)
        _keep_dtypes(optimizer, parameters, given)


def _check_complete(parameters: Sequence[Parameter], given: Grouped) -> None:
    has_any = any(given.state.values())
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.tensor.requires_grad
        and parameter.name not in given.state
        and _is_stateful(parameter, has_any)
    ]
    if missing:
        raise MissingKeyError(
            f"the state has nothing on {list_some(missing)}, not even that there was none"
            " (strict=False leaves them without state)",
            missing=missing,
        )


def _is_stateful(parameter: Parameter, is_likely: bool) -> bool:
    """Whether the optimizer keeps state for a parameter."""
    if parameter.state:
        return True
    expected = state_after_a_step(parameter)
    return is_likely if expected is None else bool(expected)


def _part(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], given: Grouped
) -> dict[str, Any]:
    own = [parameter for parameter in parameters if parameter.optimizer is optimizer]
    state = {
        parameter.index: dict(given.state[parameter.name])
        for parameter in own
        if given.state.get(parameter.name)
    }
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        members = [parameter for parameter in own if parameter.group == number]
        before = {key: value for key, value in group.items() if key != PARAMS}
        saved = _hyperparameters(members, number, given)
        after = {key: _like(before.get(key), value) for key, value in saved.items()}
        groups.append(before | after | {PARAMS: [parameter.index for parameter in members]})
    return {STATE: state, GROUPS: groups}


def _hyperparameters(
    members: Sequence[Parameter], number: int, given: Grouped
) -> Mapping[str, Any]:
    if not members:
        return given.empty_groups.get(number, {})
    named = [(parameter.name, given.hyperparameters.get(parameter.name)) for parameter in members]
    known = [(name, values) for name, values in named if values is not None]
    if not known:
        return {}
    first_name, first = known[0]
    for name, values in known[1:]:
        different = [key for key in first if not _is_same(first[key], values.get(key))]
        if different:
            key = different[0]
            raise StateError(
                f"{first_name} and {name} are in one parameter group, but were saved with"
                f" {key}={first[key]} and {values.get(key)}: group them as they were"
            )
    return first


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        same = torch.as_tensor(one).cpu() == torch.as_tensor(other).cpu()
        return bool(same.all())
    return bool(one == other)


def _like(before: Any, saved: Any) -> Any:
    """A saved number as the kind of number that the group had: schedulers keep to it."""
    if isinstance(before, torch.Tensor) and isinstance(saved, (int, float, torch.Tensor)):
        return torch.as_tensor(saved, dtype=before.dtype, device=before.device)
    if isinstance(saved, torch.Tensor) and isinstance(before, (int, float)):
        return type(before)(saved.item())
    return saved


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], given: Grouped
) -> None:
    """Undo torch's cast of state to the dtype of the parameter: it loses what fp32 moments hold."""
    for parameter in parameters:
        if parameter.optimizer is not optimizer:
            continue
        state = optimizer.state.get(parameter.tensor, {})
        for key, value in given.state.get(parameter.name, {}).items():
            now = state.get(key)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(now, torch.Tensor)
                and now.dtype != value.dtype
                and key != "step"
            ):
                state[key] = value.to(device=now.device)
