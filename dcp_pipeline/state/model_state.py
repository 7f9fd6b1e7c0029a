"""A model's state by name, and back into the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict as torch_get_model_state_dict,
    set_model_state_dict as torch_set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.errors import (
    MissingKeyError,
    ShapeMismatchError,
    StateError,
    UnexpectedKeyError,
    list_some,
)
from dcp_pipeline.core.table import Kind
from dcp_pipeline.state.fitting import Fit, FittingState, Stored
from dcp_pipeline.state.full_state import Form, Target, gathered, offloaded, sent_from_first, spread
from dcp_pipeline.state.model_names import ModelNames, spellings

logger = logging.getLogger("dcp_pipeline")

_EXTRA_STATE = "_extra_state"
"""How torch calls what ``get_extra_state`` gives, behind the name of the module."""

__all__ = [
    "IncompatibleKeys",
    "ModelState",
    "fill_meta",
    "has_flat_parameters",
    "is_in_host_memory",
    "is_on_meta",
    "model_state",
    "put_into_model",
]


class IncompatibleKeys(NamedTuple):
    """What a model and a state dict do not share, as ``nn.Module.load_state_dict`` says it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModelState(FittingState):
    """A model's state by name; finds names that a checkpoint has with wrappers' prefixes.

    Extra state of modules, which they take whole, has the size that it was saved with.
    """

    def fit(self, stored: Stored) -> Fit:
        given = {path[0]: path for path in stored.keys if len(path) == 1}
        other = spellings(map(str, self), map(str, given))
        fit = Fit(renamed={(name,): (spelled,) for name, spelled in other.items()})
        for name, value in self.items():
            spec = stored.keys.get((other.get(name, name),))
            is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            if spec is None or not is_whole or not str(name).endswith(_EXTRA_STATE):
                continue
            if spec.kind is Kind.TENSOR and spec.shape != tuple(value.shape):
                fit.dropped.append((name,))
                fit.made[(name,)] = value.new_empty(spec.shape)
        return fit


def model_state(
    model: nn.Module, options: StateDictOptions, submodules: set[nn.Module] | None = None
) -> ModelState:
    """See :func:`dcp_pipeline.get_model_state_dict`."""
    names = ModelNames(model, options.dsd_fqn_modifiers)
    with torch.no_grad():
        raw = _raw_state(model, options)
        keys = names.keys(raw)
        state = {name: raw[key] for name, key in keys.items()}
        if submodules:
            state = _of_submodules(state, model, names, submodules, options)
        if options.ignore_frozen_params:
            for name in _frozen(model, names):
                state.pop(name, None)
        if options.full_state_dict:
            return ModelState(gathered(state, options.cpu_offload))
        if options.cpu_offload:
            return ModelState({name: offloaded(value) for name, value in state.items()})
        return ModelState(state)


def has_flat_parameters(model: nn.Module) -> bool:
    """Whether FSDP1 has flattened parameters of the model; torch's own functions unflatten them."""
    return bool(FullyShardedDataParallel.fsdp_modules(model))


def is_in_host_memory(model: nn.Module) -> bool:
    """Whether there is nothing to offload.

    torch offloads FSDP1's flat parameters all the same, and then reads memory that it has freed.
    """
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _raw_state(model: nn.Module, options: StateDictOptions) -> dict[str, Any]:
    if has_flat_parameters(model):
        own = StateDictOptions(
            full_state_dict=options.full_state_dict,
            cpu_offload=options.cpu_offload and not is_in_host_memory(model),
        )
        return dict(torch_get_model_state_dict(model, options=own))
    # A subclass may have replaced state_dict by one that calls these functions.
    return dict(model.state_dict())


def _of_submodules(
    state: Mapping[str, Any],
    model: nn.Module,
    names: ModelNames,
    submodules: set[nn.Module],
    options: StateDictOptions,
) -> dict[str, Any]:
    prefixes = [
        f"{names.of(name)}." for name, module in model.named_modules() if module in submodules
    ]
    result: dict[str, Any] = {}
    for name, value in state.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            continue
        short = name if options.keep_submodule_prefixes else name[len(prefix) :]
        if short in result:
            raise StateError(
                f"several submodules have {short!r}; pass one of them, or keep_submodule_prefixes"
            )
        result[short] = value
    return result


def _frozen(model: nn.Module, names: ModelNames) -> Iterator[str]:
    for key, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            yield names.of(key)


def put_into_model(
    model: nn.Module, state: Mapping[str, Any], options: StateDictOptions
) -> IncompatibleKeys:
    """See :func:`dcp_pipeline.set_model_state_dict`."""
    if has_flat_parameters(model):
        return _put_into_flat_parameters(model, state, options)
    names = ModelNames(model, options.dsd_fqn_modifiers)
    own = model.state_dict()
    keys = names.keys(own)
    template = {name: own[key] for name, key in keys.items()}
    given = _named(state, keys)
    frozen = set(_frozen(model, names)) if options.ignore_frozen_params else set()

    def find(name: str, form: Form) -> Target:
        return Target(template.get(name), is_own=True, is_here=name in template)

    def check(found: Collection[str]) -> None:
        if options.strict:
            _check(
                [name for name in keys if name not in found and name not in frozen],
                [name for name in found if name not in keys],
            )

    if options.broadcast_from_rank0:
        given = sent_from_first(given, find, check)
    elif options.full_state_dict:
        given = spread(given, find, check)
    else:
        check(given)
        _check_shapes(model, names, given, template)
    wanted = {keys[name]: value for name, value in given.items() if name in keys}
    if is_on_meta(model):
        fill_meta(model, wanted)
    else:
        with torch.no_grad():
            model.load_state_dict(wanted, strict=False)
    missing = [name for name in keys if name not in given and name not in frozen]
    return IncompatibleKeys(missing, [name for name in given if name not in keys])


def _named(state: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The given state under the model's names, however it spells them."""
    other = spellings(keys, state)
    of_spelled = {spelled: name for name, spelled in other.items()}
    return {of_spelled.get(name, name): value for name, value in state.items()}


def _check(missing: list[str], unexpected: list[str]) -> None:
    if not missing and not unexpected:
        return
    lines = []
    if missing:
        lines.append(f"the model has, and the state lacks: {list_some(missing)}")
    if unexpected:
        lines.append(f"the state has, and the model lacks: {list_some(unexpected)}")
    kind = MissingKeyError if missing else UnexpectedKeyError
    raise kind("; ".join(lines), missing=missing, unexpected=unexpected)


def _check_shapes(
    model: nn.Module, names: ModelNames, given: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Raise for what would not fit, before torch has copied what comes before it.

    Modules that load in a way of their own may take another shape.
    """
    fixed = {
        names.of(f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module)._load_from_state_dict is nn.Module._load_from_state_dict
        and not module._load_state_dict_pre_hooks
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None and not nn.parameter.is_lazy(value)
    }
    wrong = [
        (name, list(given[name].shape), list(own[name].shape))
        for name in given.keys() & own.keys() & fixed
        if isinstance(given[name], torch.Tensor) and given[name].shape != own[name].shape
    ]
    if wrong:
        wrong.sort()
        lines = [f"{name}: {found} given, {expected} wanted" for name, found, expected in wrong]
        raise ShapeMismatchError(list_some(lines), shapes=list(wrong))


def is_on_meta(model: nn.Module) -> bool:
    """Whether a part of a model has no memory."""
    return any(value.is_meta for value in (*model.parameters(), *model.buffers()))


def fill_meta(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Let a model's tensors, some of which are on the meta device, become what is given.

    Parameters stay the same objects. What is left without values is named in a warning.

    Args:
        state: key of the model's own state dict to value.
    """
    own = model.state_dict()
    given = {key: _of_dtype(value, own.get(key)) for key, value in state.items()}
    with torch.no_grad(), _same_objects():
        model.load_state_dict(given, strict=False, assign=True)
    names = ModelNames(model)
    left = [
        names.of(key)
        for key, value in (*model.named_parameters(), *model.named_buffers())
        if value.is_meta
    ]
    if left:
        logger.warning(
            "still on the meta device, since there are no values for it: %s; fill it before the"
            " model runs",
            list_some(left),
        )


def _of_dtype(value: Any, like: Any) -> Any:
    is_both = isinstance(value, torch.Tensor) and isinstance(like, torch.Tensor)
    return value.to(like.dtype) if is_both and value.dtype != like.dtype else value


@contextlib.contextmanager
def _same_objects() -> Iterator[None]:
    """Parameters stay the objects that optimizers and ties know, and get other tensors."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _put_into_flat_parameters(
    model: nn.Module, state: Mapping[str, Any], options: StateDictOptions
) -> IncompatibleKeys:
    own = StateDictOptions(
        full_state_dict=options.full_state_dict,
        cpu_offload=options.cpu_offload,
        strict=options.strict,
        broadcast_from_rank0=options.broadcast_from_rank0,
    )
    found = torch_set_model_state_dict(model, dict(state), options=own)
    return IncompatibleKeys(list(found.missing_keys), list(found.unexpected_keys))
