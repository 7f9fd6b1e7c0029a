"""The state of models and optimizers by name: torch's state-dict helpers, put right.

Names, arguments and layouts are those of ``torch.distributed.checkpoint.state_dict``, and FSDP1's
flat parameters are left to it. What differs:

- Reading a state changes nothing. torch steps an optimizer without state, with zero gradients.
- A parameter without optimizer state is recorded as such, ``{}``, and comes back without. torch
  either makes state up, or, with gradients at hand, leaves the whole section empty.
- What is handed in is left as it is; torch takes keys out of it.
- Groups are matched by the names of their parameters, in any order and number; empty ones by place.
- State keeps its dtype; torch casts it to that of the parameter.
- Names lose what wrappers add in any nesting, ``DataParallel`` and activation checkpointing too,
  and are found under any of these spellings.
- Strided and uneven shards are cut right from full tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import OptimizerStateType, StateDictOptions

from dcp_pipeline.core.garbage import collector_paused
from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.flat_parameters import flat_optimizer_state, put_into_flat_optimizers
from dcp_pipeline.state.full_optimizer_state import sharded_state, whole_state
from dcp_pipeline.state.model_names import ModelNames
from dcp_pipeline.state.model_state import (
    IncompatibleKeys,
    has_flat_parameters,
    model_state,
    put_into_model,
)
from dcp_pipeline.state.optimizer_load import put_into_optimizers
from dcp_pipeline.state.optimizer_state import (
    STATE,
    Parameter,
    flat_key,
    flattened,
    grouped,
    named_state,
    owners,
)
from dcp_pipeline.state.optimizer_template import OptimizerState, ParameterSlot

__all__ = [
    "OptimizerStateType",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The parameters, persistent buffers and extra state of a model, by name.

    Args:
        model: on any layout, with any wrappers.
        submodules: only what these hold.
        options: ``full_state_dict`` makes whole tensors of sharded ones, one at a time; with
            ``cpu_offload`` in host memory, and then on rank 0 alone. ``cpu_offload`` alone moves
            shards to host memory; those that lie there already are not copied.
            ``ignore_frozen_params`` leaves out what takes no gradient.

    Returns:
        The model's own tensors, unless options say otherwise. On the way into ``load`` it finds
        names that were saved with the prefixes of wrappers.

    Raises:
        StateError: two entries would have one name.

    Example:
        >>> model = torch.compile(nn.Linear(2, 1))
        >>> sorted(get_model_state_dict(model))
        ['bias', 'weight']
    """
    with collector_paused():
        return model_state(model, _checked(options), submodules)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Put a state into a model.

    Args:
        model: on any layout, with any wrappers. One on the meta device gets what is given; its
            parameters stay the same objects, and what is left without values is named in a warning.
        model_state_dict: name to value; spelled with the prefixes of wrappers, or without. Sharded
            tensors as the model's are, or, with ``full_state_dict``, whole tensors.
        options: with ``broadcast_from_rank0`` only rank 0 has the whole tensors, and sends one at a
            time. ``strict`` makes keys of one side alone an error.

    Returns:
        Keys that only the model, and that only the given state has.

    Raises:
        MissingKeyError, UnexpectedKeyError: the same, with ``strict``; nothing was changed.
        ShapeMismatchError: a tensor does not fit; nothing was changed, unless the module that it is
            for loads in a way of its own.
    """
    return put_into_model(model, model_state_dict, _checked(options))


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> OptimizerStateType:
    """The state of one or several optimizers of a model, by name of parameter.

    Args:
        model: whose parameters they train.
        optimizers: with or without state.
        submodules: only parameters of these.
        options: as in :func:`get_model_state_dict`; ``flatten_optimizer_state_dict`` makes one key
            of each value, so that pipeline stages have no key in common.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [...]}``. A parameter without state has ``{}``.
        On the way into ``load`` such a parameter gets what the checkpoint has for it.

    Raises:
        StateError: a parameter is not the model's, or has two optimizers.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> found = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
        >>> found["state"], found["param_groups"][0]["params"]
        ({'weight': {}, 'bias': {}}, ['weight', 'bias'])
    """
    checked = _checked(options)
    listed = _listed(optimizers)
    with collector_paused():
        if has_flat_parameters(model):
            return flat_optimizer_state(model, listed, checked)
        names = ModelNames(model, checked.dsd_fqn_modifiers)
        parameters = owners(names, listed)
        if submodules:
            parameters = _inside(parameters, submodules)
        state = named_state(listed, parameters, checked.ignore_frozen_params)
        if checked.flatten_optimizer_state_dict:
            state = flattened(state)
        if checked.full_state_dict or checked.cpu_offload:
            return whole_state(state, checked)
        slots = [ParameterSlot(parameter) for parameter in parameters]
        return OptimizerState(state, slots, listed)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Put a state that is keyed by parameter name into optimizers.

    Args:
        model: whose parameters they train.
        optimizers: with or without state; afterwards a parameter has state if it has some in
            ``optim_state_dict``.
        optim_state_dict: in the nested or the flat layout; may hold more than is wanted.
        options: as in :func:`set_model_state_dict`.

    Raises:
        MissingKeyError: with ``strict``, nothing is said of a parameter that its optimizer keeps
            state for.
        StateError: parameters of one group were saved with other hyperparameters than the rest.
    """
    checked = _checked(options)
    listed = _listed(optimizers)
    if has_flat_parameters(model):
        put_into_flat_optimizers(model, listed, optim_state_dict, checked)
        return
    parameters = owners(ModelNames(model, checked.dsd_fqn_modifiers), listed)
    given: Mapping[str, Any] = optim_state_dict
    if checked.full_state_dict:
        given = sharded_state(given, parameters, checked)
    own = {parameter.name: _shown(parameter, given) for parameter in parameters}
    put_into_optimizers(listed, parameters, grouped(given, own), checked.strict)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], OptimizerStateType]:
    """:func:`get_model_state_dict` and :func:`get_optimizer_state_dict`."""
    listed = _listed(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, listed, submodules=submodules, options=options),
    )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """:func:`set_model_state_dict`, then :func:`set_optimizer_state_dict`."""
    found = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return found


def _shown(parameter: Parameter, given: Mapping[str, Any]) -> Mapping[Any, Any]:
    """A state that shows how keys of the flat layout are to be read."""
    if parameter.state or STATE in given:
        return parameter.state
    prefix = flat_key(STATE, parameter.name, "")
    is_nested = any(key.startswith(prefix) and "." in key[len(prefix) :] for key in given)
    return (state_after_a_step(parameter) or {}) if is_nested else {}


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends full tensors: set full_state_dict as well")
    return options


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    if isinstance(optimizers, torch.optim.Optimizer):
        return [optimizers]
    return list(optimizers)


def _inside(parameters: list[Parameter], submodules: set[nn.Module]) -> list[Parameter]:
    wanted = {id(tensor) for module in submodules for tensor in module.parameters()}
    return [parameter for parameter in parameters if id(parameter.tensor) in wanted]
