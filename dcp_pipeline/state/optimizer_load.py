"""Puts a state that is keyed by parameter name into the optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcp_pipeline.core.errors import MissingKeyError, ShapeMismatchError, StateError, list_some
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
        MissingKeyError: nothing is said of a parameter that has state once it is stepped, of an
            entry of such a state, or of a parameter's hyperparameters.
        ShapeMismatchError: a value per element of a parameter is none.
        StateError: parameters of one group were in groups that differ.
    """
    if is_strict:
        _check(parameters, given)
    parts = [_part(optimizer, parameters, given) for optimizer in optimizers]
    for optimizer, part in zip(optimizers, parts, strict=True):
        optimizer.load_state_dict(part)
        _keep_values(optimizer, parameters, given)


def _check(parameters: Sequence[Parameter], given: Grouped) -> None:
    """Raise for what the optimizers could not step with."""
    missing: list[str] = []
    wrong: list[tuple[str, object, object]] = []
    has_any = any(given.state.values())
    for parameter in parameters:
        state = given.state.get(parameter.name)
        if state:
            _compare(parameter, state, missing, wrong)
        elif state is None and parameter.tensor.requires_grad and _is_stateful(parameter, has_any):
            missing.append(parameter.name)
        if parameter.name not in given.hyperparameters:
            missing.append(f"{GROUPS} of {parameter.name}")
    if missing:
        raise MissingKeyError(
            f"the state has nothing on {list_some(missing)}, not even that there was none"
            " (strict=False goes on without)",
            missing=missing,
        )
    if wrong:
        lines = [f"{name}: {found} given, {expected} wanted" for name, found, expected in wrong]
        raise ShapeMismatchError(list_some(lines), shapes=wrong)


def _compare(
    parameter: Parameter,
    state: Mapping[Any, Any],
    missing: list[str],
    wrong: list[tuple[str, object, object]],
) -> None:
    """Note what the state of a parameter lacks, and what is not of its shape."""
    expected = parameter.state or state_after_a_step(parameter) or {}
    for key, usual in expected.items():
        name = f"{parameter.name}.{key}"
        if key not in state:
            missing.append(name)
        elif isinstance(usual, torch.Tensor) and usual.shape == parameter.tensor.shape:
            found = getattr(state[key], "shape", None)
            if found is None or tuple(found) != tuple(usual.shape):
                shown = type(state[key]).__name__ if found is None else list(found)
                wrong.append((name, shown, list(usual.shape)))


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


def _keep_values(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], given: Grouped
) -> None:
    """Undo what torch does to state on its way in.

    It casts tensors to the dtype of the parameter, which loses what fp32 moments hold, and takes
    strings for lists.
    """
    for parameter in parameters:
        if parameter.optimizer is optimizer:
            state = optimizer.state.get(parameter.tensor, {})
            for key, value in given.state.get(parameter.name, {}).items():
                if key in state and key != "step":
                    state[key] = _kept(value, state[key])


def _kept(value: Any, now: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor):
        return value.to(device=now.device) if now.dtype != value.dtype else now
    if isinstance(value, Mapping) and isinstance(now, Mapping):
        return {key: _kept(child, now.get(key)) for key, child in value.items()}
    if isinstance(value, (str, bytes)):
        return value
    if type(value) in (list, tuple) and type(now) is type(value):
        return type(value)(_kept(one, other) for one, other in zip(value, now, strict=True))
    return now
