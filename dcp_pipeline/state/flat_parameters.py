"""Optimizers over FSDP1's flat parameters, which torch's own functions take apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict as torch_get,
    set_optimizer_state_dict as torch_set,
)

from dcp_pipeline.core.path import Path
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.state.flatten import flatten
from dcp_pipeline.state.model_names import ModelNames
from dcp_pipeline.state.model_state import is_in_host_memory
from dcp_pipeline.state.optimizer_state import (
    GROUPS,
    PARAMS,
    STATE,
    Grouped,
    flattened,
    grouped,
)
from dcp_pipeline.state.optimizer_template import OptimizerState, Slot

__all__ = ["flat_optimizer_state", "put_into_flat_optimizers"]


class FlatSlot(Slot):
    """A part of a flat parameter.

    Args:
        own: its state; or ``{}``, and
        first: what torch makes of it in a step without gradients.
    """

    def __init__(self, name: str, own: Mapping[Any, Any], first: Mapping[Any, Any]) -> None:
        self.name, self.own = name, own
        self._first = first

    def memory(self, there: Mapping[Path, KeySpec]) -> dict[Path, Any]:
        return {leaf.path: leaf.value for leaf in flatten(dict(self._first)).leaves}


def flat_optimizer_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """torch's state by name; where there is none yet, ``{}`` for each parameter."""
    nested = replace(
        options,
        flatten_optimizer_state_dict=False,
        cpu_offload=options.cpu_offload and not is_in_host_memory(model),
    )
    found: dict[str, Any]
    first: Mapping[str, Any] = {}
    if any(optimizer.state for optimizer in optimizers):
        found = dict(torch_get(model, optimizers, options=nested))
    else:
        with _left_as_they_are(optimizers):
            found = dict(torch_get(model, optimizers, options=nested))
        first = found.get(STATE, {})
        found = found | {STATE: {name: {} for name in first}} if found else {}
    if not found or (options.full_state_dict and options.cpu_offload and dist.get_rank()):
        return {}  # another rank has it all
    slots = [FlatSlot(name, own, first.get(name, {})) for name, own in found[STATE].items()]
    if options.flatten_optimizer_state_dict:
        found = flattened(found)
    return OptimizerState(found, slots, optimizers)


def put_into_flat_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
    options: StateDictOptions,
) -> None:
    """torch's way back."""
    names = ModelNames(model).of_parameters().values()
    given = grouped(state, {name: {} for name in names})
    if not any(given.state.values()):
        _forget_state(model, optimizers, given)
        return
    nested = replace(options, flatten_optimizer_state_dict=False)
    groups = [dict(values) | {PARAMS: [name]} for name, values in given.hyperparameters.items()]
    found: Any = {STATE: given.state, GROUPS: groups}
    with _without_gradients(optimizers):
        torch_set(model, optimizers, found, options=nested)


def _forget_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], given: Grouped
) -> None:
    """As the optimizers were before their first step."""
    names = ModelNames(model).of_parameters()
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group[PARAMS]:
                group.update(given.hyperparameters.get(names.get(id(parameter), ""), {}))


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
