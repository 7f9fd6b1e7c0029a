"""What ``Stateful`` objects give and take, where some of them are modules.

A module that stands in a state as it is, an averaged or a compiled copy, say, has the names that it
has in :class:`AppState`, and gets memory if it lies on the meta device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from dcp_pipeline.core.errors import StateError
from dcp_pipeline.state.model_names import ModelNames
from dcp_pipeline.state.model_state import ModelState, fill_meta, is_on_meta
from dcp_pipeline.types.dcp import Stateful

__all__ = ["ModuleState", "give_state", "state_of"]

_METADATA = "_metadata"
"""What ``nn.Module.state_dict`` hangs onto its result: versions, which loading looks at."""


class ModuleState(ModelState):
    """A module's state by name.

    Attributes:
        keys_of_names: name to the key that the module has for it.
        metadata: of the module's own state dict.
    """

    def __init__(
        self, state: Mapping[str, Any], keys_of_names: Mapping[str, str], metadata: Any
    ) -> None:
        super().__init__({name: state[key] for name, key in keys_of_names.items()})
        self.keys_of_names = keys_of_names
        self.metadata = metadata


def state_of(owner: Stateful) -> Any:
    """An object's ``state_dict()``; that of a module without what wrappers add to its names."""
    state = owner.state_dict()
    if not isinstance(owner, nn.Module) or not _is_by_name(state):
        return state  # a subclass may return anything
    return ModuleState(state, _keys(ModelNames(owner), state), getattr(state, _METADATA, None))


def give_state(owner: Stateful, state: Any) -> None:
    """Let an object take what :func:`state_of` has given, with other values.

    Args:
        state: that of a module may be a plain copy.
    """
    if isinstance(owner, nn.Module) and _is_by_name(state):
        given = _spelled(owner, state)
        has_own_way = type(owner).load_state_dict is not nn.Module.load_state_dict
        if not has_own_way and is_on_meta(owner):
            fill_meta(owner, given)
            return
        owner.load_state_dict(given)
    else:
        owner.load_state_dict(state)


def _is_by_name(state: Any) -> bool:
    return isinstance(state, Mapping) and all(isinstance(key, str) for key in state)


def _spelled(owner: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state under the keys that the module itself has."""
    metadata = None
    if isinstance(state, ModuleState):
        keys, metadata = state.keys_of_names, state.metadata
    else:
        names = ModelNames(owner)
        keys = _keys(names, owner.state_dict()) if names.are_changed else {}
    given: dict[str, Any] = OrderedDict(
        (keys.get(name, name), value) for name, value in state.items()
    )
    if metadata is not None:
        setattr(given, _METADATA, metadata)
    return given


def _keys(names: ModelNames, state: Mapping[str, Any]) -> Mapping[str, str]:
    """Name to key; both are the same where two keys would have one name."""
    try:
        return names.keys(state)
    except StateError:
        return {key: key for key in state}
