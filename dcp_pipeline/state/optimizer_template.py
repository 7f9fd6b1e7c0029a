"""An optimizer's state as a part of a template: asks for what the checkpoint has for it."""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.errors import list_some
from dcp_pipeline.core.path import Index, Path, dotted
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.fitting import Fit, FittingState, Stored
from dcp_pipeline.state.flatten import flatten
from dcp_pipeline.state.leaf_kinds import is_wrapper
from dcp_pipeline.state.optimizer_state import (
    GROUPS,
    STATE,
    Parameter,
    flat_key,
    is_flat,
    longest_name,
)
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["OptimizerState", "ParameterSlot", "Slot", "paths_of"]

logger = logging.getLogger("dcp_pipeline")


class Slot(ABC):
    """A parameter's place in an optimizer's state.

    Attributes:
        name: of the parameter.
        own: its state as it is now; empty if there is none yet.
        is_known: whether it is known what the optimizer needs.
    """

    name: str
    own: Mapping[Any, Any]
    is_known = True

    @abstractmethod
    def memory(self, there: Mapping[Path, KeySpec]) -> dict[Path, Any] | None:
        """Path to the memory for a state that is not there yet.

        Args:
            there: what the checkpoint has for the parameter.

        Returns:
            Also what the checkpoint lacks and the optimizer needs, so that it is missed. ``None``
            where nobody knows, and the checkpoint has nothing.
        """


class ParameterSlot(Slot):
    """A parameter that its optimizer knows as the model does."""

    def __init__(self, parameter: Parameter) -> None:
        self.name, self.own = parameter.name, parameter.state
        self._parameter = parameter

    def memory(self, there: Mapping[Path, KeySpec]) -> dict[Path, Any] | None:
        if not there and not self._parameter.tensor.requires_grad:
            return {}
        expected = state_after_a_step(self._parameter)
        if expected is None and not there:
            return None
        self.is_known = expected is not None
        values = {leaf.path: leaf.value for leaf in flatten(dict(expected or {})).leaves}
        # The keys of a flat layout are strings, whatever they were.
        spelled = {dotted(path): path for path in values}
        is_torchs = type(self._parameter.optimizer).__module__.startswith("torch.optim.")
        memory = {}
        for stored_path, spec in there.items():
            path = spelled.get(dotted(stored_path), stored_path)
            if is_torchs and self.is_known and path not in values:
                continue  # they make all of their state in the first step: it is another's
            memory[path] = self._tensor(path, spec, values.get(path))
        # What is missing will be named; nothing is ever put there.
        memory = {path: torch.empty(()) for path in values} | memory
        return self._with_wrappers(memory, expected or {})

    def _with_wrappers(
        self, memory: dict[Path, Any], expected: Mapping[Any, Any]
    ) -> dict[Path, Any]:
        """Tensors that are made of others, as the optimizer makes them, instead of their parts."""
        if not any(map(is_wrapper, expected.values())):
            return memory
        real = state_after_a_step(self._parameter, is_real=True) or {}
        whole = {(key,): value for key, value in real.items() if is_wrapper(value)}
        return whole | {path: value for path, value in memory.items() if path[:1] not in whole}

    def _tensor(self, path: Path, stored: KeySpec, usual: Any) -> Any:
        """A tensor to fill, sharded as the optimizer would have it; ``None`` for a value."""
        like = self._parameter.tensor
        is_usual = isinstance(usual, torch.Tensor) and usual.dim() > 0
        is_per_element = is_usual and usual.shape == like.shape
        if is_per_element and (stored.dtype is None or stored.shape != tuple(like.shape)):
            # Of another kind or shape, as will be said.
            return torch.empty(tuple(like.shape), dtype=usual.dtype, device="meta")
        if stored.dtype is None:
            return None
        # Of the dtype that it was saved in: an optimizer's state may be finer than its parameter.
        dtype = DTYPES[stored.dtype]
        if stored.shape == ():
            return torch.empty((), dtype=dtype, device="cpu")
        if stored.shape == tuple(like.shape):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        if not isinstance(like, DTensor):
            return torch.empty(stored.shape, dtype=dtype, device=like.device)
        # Not one value per element of the parameter: only its optimizer knows how it is sharded.
        state = dict(state_after_a_step(self._parameter, is_real=True) or {})
        sharded = {leaf.path: leaf.value for leaf in flatten(state).leaves}.get(path)
        if not isinstance(sharded, torch.Tensor) or tuple(sharded.shape) != stored.shape:
            return None
        return torch.empty_like(sharded, dtype=dtype)


class OptimizerState(FittingState):
    """The state of optimizers by parameter name, in the nested or the flat layout.

    A parameter that has no state here gets memory for what the checkpoint has; one that has state
    here, and had none when the checkpoint was saved, loses it. Hyperparameters are taken as they
    come: they are sorted by parameter name when they are put into the optimizers. The checkpoint
    may be in the other layout.

    Attributes:
        optimizers: whose state it is.
    """

    def __init__(
        self,
        items: Mapping[str, Any],
        slots: Sequence[Slot],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(items)
        self._slots = slots
        self.optimizers = optimizers

    def fit(self, stored: Stored) -> Fit:
        fit = Fit()
        is_flat_here = is_flat(self)
        below = _Below(stored, {slot.name for slot in self._slots})
        for slot in self._slots:
            place = _place(slot.name, (), is_flat_here)
            if below.has_none(slot.name):
                self._forget(slot, place, is_flat_here, fit)
            elif not slot.own:
                self._make(slot, below, is_flat_here, fit)
            else:
                _fit_lists(slot, below.states.get(slot.name, {}), is_flat_here, fit)
        if below.groups:
            self._take_groups(below.groups, fit)
        self._warn_of_gaps(below)
        return fit

    def _warn_of_gaps(self, below: _Below) -> None:
        """Say what others have and one parameter lacks, where nobody knows what it needs."""
        unknown = [slot for slot in self._slots if not slot.is_known and not slot.own]
        entries = {slot.name: _entries(below.states.get(slot.name, {})) for slot in unknown}
        most = set().union(*entries.values())
        gaps = [
            f"{name}: {', '.join(sorted(most - found))}"
            for name, found in entries.items()
            if found and most - found
        ]
        if gaps:
            logger.warning(
                "the checkpoint has optimizer state for other parameters that these lack, and it"
                " cannot be told whether they need it: %s",
                list_some(gaps),
            )

    def _forget(self, slot: Slot, place: Path, is_flat_here: bool, fit: Fit) -> None:
        if slot.own:
            fit.put[place] = {}
            if is_flat_here:
                inside = {_place(slot.name, path, True)[:1] for path in paths_of(slot.own)}
                fit.removed += sorted(inside)

    def _make(self, slot: Slot, below: _Below, is_flat_here: bool, fit: Fit) -> None:
        memory = slot.memory(below.states.get(slot.name, {}))
        if memory is None and below.states:
            # Nobody knows what it should be; that there is nothing is not to go unnoticed.
            memory = {(): torch.empty(())}
        for path, value in (memory or {}).items():
            fit.made[_place(slot.name, path, is_flat_here)] = value
        for path in below.empty_in(slot.name):
            fit.put[_place(slot.name, path, is_flat_here)] = {}
        place = _place(slot.name, (), is_flat_here)
        if memory and is_flat_here and place not in fit.made:
            fit.removed.append(place)
        elif not memory and slot.is_known:
            # An empty mapping would take whatever there is, of another optimizer.
            fit.dropped.append(place)

    def _take_groups(self, there: Iterable[Path], fit: Fit) -> None:
        """Have the groups of the checkpoint instead of those that are here."""
        fit.made.update(dict.fromkeys(there))
        stored = {path[:1] for path in there}
        fit.dropped.append((GROUPS,))
        for key in self:
            if key == GROUPS or str(key).startswith(f"{GROUPS}."):
                if (key,) not in stored:
                    fit.removed.append((key,))
                elif key != GROUPS:
                    fit.dropped.append((key,))
        names = {(at.position, dotted(path[2:3])) for path in there for at in _position(path)}
        if not names:
            return
        count = max(position for position, _ in names) + 1
        for position, group in enumerate(self.get(GROUPS, ())):
            if position >= count:
                fit.removed.append((GROUPS, Index(position)))
                continue
            # Of another group, perhaps of another kind of optimizer.
            own = [key for key in group if (position, str(key)) not in names]
            fit.removed += [(GROUPS, Index(position), key) for key in own]


def _fit_lists(slot: Slot, there: Mapping[Path, KeySpec], is_flat_here: bool, fit: Fit) -> None:
    """Give lists, such as the history of L-BFGS, the length that they were saved with."""
    own = {leaf.path: leaf.value for leaf in flatten(dict(slot.own)).leaves}
    here, saved = _lengths(own), _lengths(there)
    spelled = {dotted(path): path for path in here}
    for stored_path, length in saved.items():
        path = spelled.get(dotted(stored_path))
        if path is None:
            continue  # it is missed, or not asked for, as anything else
        for position in range(length, here[path]):
            fit.removed.append(_place(slot.name, (*path, Index(position)), is_flat_here))
        depth = len(stored_path)
        entries = {
            (*path, *inside[depth:]): (inside, spec)
            for inside, spec in there.items()
            if inside[:depth] == stored_path
        }
        is_longer = length > here[path]
        memory = (slot.memory(there) or {}) if is_longer else {}
        for inside, (spelled_there, spec) in entries.items():
            place = _place(slot.name, inside, is_flat_here)
            if _position_at(inside, len(path)) >= here[path]:
                fit.made[place] = memory.get(inside, memory.get(spelled_there))
            elif spec.dtype is None and isinstance(own.get(inside), torch.Tensor):
                fit.dropped.append(place)  # an entry of another kind
                fit.made[place] = None


def _lengths(paths: Iterable[Path]) -> dict[Path, int]:
    """Where the lists lie that no other list holds, and how many entries they have."""
    found: dict[Path, int] = {}
    for path in paths:
        keys = tuple(itertools.takewhile(lambda part: not isinstance(part, Index), path))
        if len(keys) < len(path):
            found[keys] = max(found.get(keys, 0), 1 + _position_at(path, len(keys)))
    return found


def _position_at(path: Path, depth: int) -> int:
    part = path[depth] if depth < len(path) else None
    return part.position if isinstance(part, Index) else -1


def _entries(there: Mapping[Path, KeySpec]) -> set[str]:
    return {dotted(path) for path in there}


def paths_of(state: Mapping[Any, Any]) -> list[Path]:
    """Paths to the leaves of a nested state."""
    return [leaf.path for leaf in flatten(dict(state)).leaves]


def _position(path: Path) -> list[Index]:
    return [part for part in path[1:2] if isinstance(part, Index)]


def _place(name: str, inner: Path, is_flat_here: bool) -> Path:
    """Where the state of a parameter lies, or a value of it."""
    if not is_flat_here:
        return (STATE, name, *inner)
    # Mappings are joined in a key; lists are not.
    keys = tuple(itertools.takewhile(lambda part: not isinstance(part, Index), inner))
    return (flat_key(STATE, name, *keys), *inner[len(keys) :])


class _Below:
    """What a checkpoint has of single parameters.

    Attributes:
        states: name to path within its state to what is stored.
        groups: where hyperparameters lie.
    """

    def __init__(self, stored: Stored, names: set[str]) -> None:
        self.states: dict[str, dict[Path, KeySpec]] = {}
        self.groups: list[Path] = []
        self._empty: dict[str, list[Path]] = {}
        for path, spec in stored.keys.items():
            if path[0] == GROUPS or str(path[0]).startswith(f"{GROUPS}."):
                self.groups.append(path)
                continue
            name, inner = _name_and_rest(path, names)
            if name is not None and inner:
                self.states.setdefault(name, {})[inner] = spec
        for path in stored.empty:
            name, inner = _name_and_rest(path, names)
            # Ranks that are outside of a parameter's mesh had none, and the others had some.
            if name is not None and (inner or name not in self.states):
                self._empty.setdefault(name, []).append(inner)

    def has_none(self, name: str) -> bool:
        """Whether it is recorded that a parameter had no state."""
        return () in self._empty.get(name, ())

    def empty_in(self, name: str) -> list[Path]:
        """Mappings within the state of a parameter that hold nothing."""
        return self._empty.get(name, [])


def _name_and_rest(path: Path, names: set[str]) -> tuple[str | None, Path]:
    if not path:
        return None, ()
    if path[0] == STATE:
        name = dotted(path[1:2])
        return (name if name in names else None), path[2:]
    section, _, rest = str(path[0]).partition(".")
    found = longest_name(rest, names) if section == STATE else None
    if found is None:
        return None, ()
    inner = rest[len(found) + 1 :]
    return found, ((*inner.split("."), *path[1:]) if inner else path[1:])
