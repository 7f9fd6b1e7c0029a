"""Saves and loads of one process, and objects with a state of their own."""

from pathlib import Path
from typing import Any

import torch

import dcp_pipeline
from dcp_pipeline import Stateful
from tests.equal import assert_same

KINDS = ["torch_save", "safetensors"]


def save(state: Any, path: Path, kind: str = "torch_save", **config: Any) -> Any:
    return dcp_pipeline.save(state, checkpoint_id=path, config={"serialization": kind, **config})


def load(state: Any, path: Path, kind: str = "torch_save", **config: Any) -> Any:
    return dcp_pipeline.load(state, checkpoint_id=path, config={"serialization": kind, **config})


def ordered(value: Any) -> Any:
    """Dicts with their keys in one order: a template that is filled takes them as they come."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, list | tuple):
        return type(value)(ordered(item) for item in value)
    return value


class Loader:
    """A state whose structure changes over time, as that of a data loader."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        if not self.position:
            return {}
        workers = {f"worker_{n}": {"at": n, "seen": torch.arange(n)} for n in range(self.position)}
        return {"position": self.position, "workers": workers, "ended": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state.get("position", 0)
        wanted = Loader(self.position).state_dict()
        assert_same(ordered(state), ordered(wanted))


class Outer:
    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return dict(self.parts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(self.parts.get(name), Stateful):
                # Objects within the state have taken theirs already.
                assert value is self.parts[name], name
        self.parts = dict(state)
