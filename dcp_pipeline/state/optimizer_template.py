"""An optimizer's state as a part of a template: asks for what the checkpoint has for it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.path import Index, Path, dotted
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.fitting import Fit, FittingState, Stored
from dcp_pipeline.state.flatten import flatten
from dcp_pipeline.state.optimizer_state import GROUPS, STATE, Parameter, flat_key, longest_name
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["OptimizerState"]


class OptimizerState(FittingState):
    """The state of optimizers by parameter name, in the nested or the flat layout.

    A parameter that has no state here gets memory for what the checkpoint has; one that has state
    here, and had none when the checkpoint was saved, loses it. Hyperparameters are taken as they
    come: they are sorted by parameter name when they are put into the optimizers.
    """

    def __init__(
        self, items: Mapping[str, Any], parameters: Sequence[Parameter], is_flat: bool
    ) -> None:
        super().__init__(items)
        self._parameters = parameters
        self._is_flat = is_flat

    def fit(self, stored: Stored) -> Fit:
        fit = Fit()
        below = _Below(stored, self._is_flat, {p.name: p for p in self._parameters})
        for parameter in self._parameters:
            if not parameter.tensor.requires_grad and not parameter.state:
                continue
            self._fit_state(parameter, below, fit)
        if self._is_flat:
            self._fit_flat_groups(below, fit)
        else:
            self._fit_groups(stored, fit)
        return fit

    def _fit_state(self, parameter: Parameter, below: _Below, fit: Fit) -> None:
        name, own = parameter.name, parameter.state
        place, there = below.place(name), below.of(name)
        if below.has_none(name):
            if own and self._is_flat:
                fit.removed += [below.place(name, path) for path in _paths(own)]
                fit.made[place] = None
            elif own:
                fit.emptied.append(place)
            return
        if own:
            return  # the template has it as it is
        expected = state_after_a_step(parameter)
        wanted = dict.fromkeys((*there, *_paths(expected or {})))
        if not wanted and expected is None and below.has_some(self._parameters):
            # Nobody knows what it should be; that there is nothing is not to go unnoticed.
            wanted = {(): None}
        for path in below.empty_in(name):
            fit.made[below.place(name, path)] = {}
        for path in wanted:
            value = _memory(parameter, path, there.get(path), _at(expected or {}, path))
            fit.made[below.place(name, path)] = value
        if wanted and self._is_flat:
            fit.removed.append(place)

    def _fit_groups(self, stored: Stored, fit: Fit) -> None:
        there = [path for path in stored.keys if path[0] == GROUPS]
        if not there:
            return  # and what is missing is said
        fit.dropped.append((GROUPS,))
        fit.made.update(dict.fromkeys(there))
        names = {(at.position, dotted(path[2:3])) for path in there for at in _position(path)}
        if not names:
            return  # before torch 2.4 DCP stored the list as one value
        count = max(position for position, _ in names) + 1
        for position, group in enumerate(self[GROUPS]):
            if position >= count:
                fit.removed.append((GROUPS, Index(position)))
                continue
            # Of another group, perhaps of another kind of optimizer.
            own = [key for key in group if (position, str(key)) not in names]
            fit.removed += [(GROUPS, Index(position), key) for key in own]

    def _fit_flat_groups(self, below: _Below, fit: Fit) -> None:
        for parameter in self._parameters:
            there = below.hyperparameters(parameter.name)
            if not there:
                continue  # and what is missing is said
            prefix = flat_key(GROUPS, parameter.name, "")
            fit.dropped += [(key,) for key in self if str(key).startswith(prefix)]
            fit.made.update(dict.fromkeys(there))


class _Below:
    """What a checkpoint has of single parameters."""

    def __init__(self, stored: Stored, is_flat: bool, names: Mapping[str, Parameter]) -> None:
        self._empty = stored.empty
        self._is_flat = is_flat
        self._states: dict[str, dict[Path, KeySpec]] = {}
        self._hyperparameters: dict[str, list[Path]] = {}
        for path, spec in stored.keys.items():
            if is_flat:
                self._sort(path, spec, names)
            elif path[0] == STATE and len(path) > 2:
                self._states.setdefault(dotted(path[1:2]), {})[path[2:]] = spec

    def _sort(self, path: Path, spec: KeySpec, names: Mapping[str, Parameter]) -> None:
        section, _, rest = str(path[0]).partition(".")
        name = longest_name(rest, names)
        if name is None or name == rest:
            return
        if section == STATE:
            inner = (rest[len(name) + 1 :], *path[1:])
            self._states.setdefault(name, {})[inner] = spec
        elif section == GROUPS:
            self._hyperparameters.setdefault(name, []).append(path)

    def place(self, name: str, inner: Path = ()) -> Path:
        """Where the state of a parameter lies, or a value of it."""
        if not self._is_flat:
            return (STATE, name, *inner)
        # Mappings are joined in a key; lists are not.
        keys = tuple(itertools.takewhile(lambda part: not isinstance(part, Index), inner))
        return (flat_key(STATE, name, *keys), *inner[len(keys) :])

    def of(self, name: str) -> dict[Path, KeySpec]:
        """Path within the state of a parameter to what is stored."""
        return self._states.get(name, {})

    def hyperparameters(self, name: str) -> list[Path]:
        """Where those of a parameter's group lie, in the flat layout."""
        return self._hyperparameters.get(name, [])

    def has_none(self, name: str) -> bool:
        """Whether it is recorded that a parameter had no state."""
        return self.place(name) in self._empty

    def empty_in(self, name: str) -> list[Path]:
        """Mappings within the state of a parameter that hold nothing."""
        above = self.place(name)
        if self._is_flat:
            return []
        return [path[2:] for path in self._empty if path[:2] == above and len(path) > 2]

    def has_some(self, parameters: Sequence[Parameter]) -> bool:
        """Whether there is state of any of ``parameters``."""
        return any(self.of(parameter.name) for parameter in parameters)


def _position(path: Path) -> list[Index]:
    return [part for part in path[1:2] if isinstance(part, Index)]


def _paths(state: Mapping[Any, Any]) -> list[Path]:
    return [leaf.path for leaf in flatten(state).leaves]


def _at(state: Mapping[Any, Any], path: Path) -> Any:
    return next((leaf.value for leaf in flatten(state).leaves if leaf.path == path), None)


def _memory(parameter: Parameter, path: Path, stored: KeySpec | None, expected: Any) -> Any:
    """A tensor to fill, sharded as the optimizer would have it; ``None`` for a value."""
    if stored is None:
        # It is missing, and will be named; nothing is ever put there.
        return torch.empty(())
    if stored.dtype is None:
        return None
    dtype = DTYPES[stored.dtype]
    if isinstance(expected, torch.Tensor):
        dtype = expected.dtype
    like = parameter.tensor
    if stored.shape == ():
        return torch.empty((), dtype=dtype, device="cpu")
    if stored.shape != tuple(like.shape) and isinstance(like, DTensor):
        # Not one value per element of the parameter: only its optimizer knows how it is sharded.
        sharded = _at(state_after_a_step(parameter, is_sharded=True) or {}, path)
        if not isinstance(sharded, torch.Tensor) or tuple(sharded.shape) != stored.shape:
            return None
        return torch.empty_like(sharded, dtype=dtype)
    if stored.shape != tuple(like.shape):
        return torch.empty(stored.shape, dtype=dtype, device=like.device)
    return torch.empty_like(like, dtype=dtype, requires_grad=False)
