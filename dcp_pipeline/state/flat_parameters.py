"""Optimizers over FSDP1's flat parameters, which torch's own functions take apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict as torch_get,
    set_optimizer_state_dict as torch_set,
)

from dcp_pipeline.core.path import Path
from dcp_pipeline.state.fitting import Fit, FittingState, Stored
from dcp_pipeline.state.optimizer_state import GROUPS, PARAMS, STATE

__all__ = ["flat_optimizer_state", "put_into_flat_optimizers"]


class NoStateYet(FittingState):
    """The nested state of optimizers that were not stepped; asks for what a checkpoint has.

    Args:
        first: torch's state as it is after a step without gradients.
    """

    def __init__(self, first: Mapping[str, Any]) -> None:
        super().__init__({STATE: {name: {} for name in first[STATE]}, GROUPS: first[GROUPS]})
        self._first = first

    def fit(self, stored: Stored) -> Fit:
        fit = Fit()
        for name, state in self._first[STATE].items():
            if (STATE, name) not in stored.empty:
                fit.made.update(((STATE, name, *path), value) for path, value in _leaves(state))
        return fit


def _leaves(state: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def flat_optimizer_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """torch's state by name; where there is none yet, ``{}`` for each parameter."""
    if any(optimizer.state for optimizer in optimizers):
        return dict(torch_get(model, optimizers, options=options))
    with _left_as_they_are(optimizers):
        first = torch_get(model, optimizers, options=options)
    if options.flatten_optimizer_state_dict or not first:
        return dict(first)
    return NoStateYet(first)


def put_into_flat_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    options: StateDictOptions,
) -> None:
    """torch's way back."""
    if state.get(STATE) and not any(state[STATE].values()):
        _forget_state(optimizers, state[GROUPS])
        return
    given = dict(state)
    if GROUPS in given:
        given[GROUPS] = [dict(group) for group in given[GROUPS]]
        given[STATE] = {name: dict(values) for name, values in given[STATE].items()}
    with _without_gradients(optimizers):
        torch_set(model, optimizers, given, options=options)


def _forget_state(
    optimizers: Sequence[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]
) -> None:
    """As the optimizers were before their first step."""
    own = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, saved in zip(own, groups, strict=False):
        group.update({key: value for key, value in saved.items() if key != PARAMS})
    for optimizer in optimizers:
        optimizer.state.clear()


@contextlib.contextmanager
def _left_as_they_are(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """torch steps an optimizer without state, at a learning rate of zero; nothing of it stays."""
    with _without_gradients(optimizers):
        try:
            yield
        finally:
            for optimizer in optimizers:
                optimizer.state.clear()


@contextlib.contextmanager
def _without_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """torch takes gradients for a sign that there is state."""
    parameters = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group[PARAMS]
    ]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
