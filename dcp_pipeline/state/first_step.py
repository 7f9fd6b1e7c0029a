"""What an optimizer will keep for a parameter, found out without stepping it.

A twin of the optimizer takes a step on a stand-in for the parameter that has no memory (a tensor on
the meta device), or, where its step needs values, on zeros.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcp_pipeline.state.optimizer_state import PARAMS, Parameter

__all__ = ["state_after_a_step"]

_KERNELS = ("fused", "foreach", "capturable", "differentiable")
"""Settings that choose a kernel; what it keeps is the same."""


def state_after_a_step(parameter: Parameter, is_real: bool = False) -> Mapping[Any, Any] | None:
    """The entries that the optimizer would make for a parameter; their values mean nothing.

    It is found out once for a parameter. What is kept has the shapes, dtypes and devices of these
    entries, and no memory; only tensors that are made of others are as the step has made them.

    Args:
        is_real: step on zeros that are sharded as the parameter is, and lie where it does. All
            ranks of its mesh have to take part. Otherwise entries are plain tensors of global
            shapes.

    Returns:
        ``None`` where the optimizer cannot step on one parameter alone.
    """
    if is_real not in parameter.answers:
        found = _found_out(parameter, is_real)
        parameter.answers[is_real] = None if found is None else _without_memory(found)
    return parameter.answers[is_real]


def _found_out(parameter: Parameter, is_real: bool) -> Mapping[Any, Any] | None:
    if not _can_have_a_twin(parameter.optimizer):
        return None
    like = parameter.tensor
    devices = ["meta", "cpu"]
    if is_real:
        devices = [like.device.type]
    for device in devices:
        if is_real:
            stand_in = torch.zeros_like(like, requires_grad=False)
        else:
            stand_in = torch.zeros(tuple(like.shape), dtype=like.dtype, device=device)
        stand_in.requires_grad_().grad = torch.zeros_like(stand_in)
        try:
            with _NoCollectives():  # type: ignore[no-untyped-call]
                return _step(parameter, stand_in)
        except Exception:
            # Optimizers may do anything in their step. What one does not tell is not checked.
            continue
    return None


def _without_memory(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_memory(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_memory, value))
    if isinstance(value, DTensor):
        local = value.to_local()
        return DTensor.from_local(
            local.new_empty(()).expand(local.shape),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    if type(value) is torch.Tensor and not value.is_meta:
        return value.new_empty(()).expand(value.shape)
    return value


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what an optimizer sends itself: other ranks may have other parameters.

    What sharded tensors send among the ranks of their mesh goes through.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            raise RuntimeError(f"{func} in the step of a stand-in")
        return func(*args, **(kwargs or {}))


def _can_have_a_twin(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of a copy leaves alone all that the optimizer holds.

    One that wraps another optimizer, or has lists of its own, would step these.
    """
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    own = {name: value for name, value in vars(optimizer).items() if name not in _usual_members()}
    return all(_is_plain(value) for value in own.values())


@functools.cache
def _usual_members() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"step"}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, type, torch.dtype))


def _step(parameter: Parameter, stand_in: torch.Tensor) -> Mapping[Any, Any]:
    optimizer = parameter.optimizer
    # copy.copy takes along what torch pickles, and leaves what the class has of its own.
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)  # schedulers put a wrapper around it there
    for name, value in vars(twin).items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            twin.__dict__[name] = OrderedDict()
    group = dict(optimizer.param_groups[parameter.group])
    group.update({name: False for name in _KERNELS if group.get(name)})
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"] = group["lr"].detach().cpu().clone()  # some want it to stay a tensor
    twin.state = defaultdict(dict)
    twin.param_groups = [group | {PARAMS: [stand_in]}]
    twin.defaults = dict(optimizer.defaults) | {name: False for name in _KERNELS}
    step = inspect.unwrap(type(optimizer).step)
    # Compiling would take seconds, for values that mean nothing.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        step(twin)
    return dict(twin.state.get(stand_in, {}))
