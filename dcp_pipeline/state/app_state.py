"""A model, its optimizers and what else a training job resumes from, as one ``Stateful``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcp_pipeline.state.helpers import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = ["AppState"]

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class AppState:
    """What a training job saves and resumes from.

    Names are the model's parameter names on every rank and layout: prefixes of wrappers are taken
    off, and optimizer state is keyed by parameter name. Taking the state changes nothing; a
    parameter that was not stepped yet has no state, then as now.

    Args:
        model: on any layout, with any wrappers; on the meta device it gets memory when it is
            loaded.
        optimizer: one, several, or ``None``.
        options: of the state-dict helpers; not ``full_state_dict``, which gathers.
        stateful: further objects with ``state_dict`` and ``load_state_dict``, or plain values, by
            name. A plain value is replaced on load; read it from :attr:`stateful`.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> app = AppState(model, optimizer, progress={"step": 3})
        >>> sorted(app.state_dict())
        ['model', 'optimizer', 'progress']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        options: StateDictOptions | None = None,
        **stateful: Any,
    ) -> None:
        taken = {"model", "optimizer"} & set(stateful)
        if taken:
            raise ValueError(f"AppState keeps {', '.join(sorted(taken))} itself")
        self.model = model
        self.optimizers = _listed(optimizer)
        self.options = options
        self.stateful = stateful

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, sharded as the model is."""
        state: dict[str, Any] = {"model": get_model_state_dict(self.model, options=self.options)}
        if self.optimizers:
            state["optimizer"] = get_optimizer_state_dict(
                self.model, self.optimizers, options=self.options
            )
        return state | self.stateful

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state; objects among the further ones have taken theirs already."""
        set_model_state_dict(self.model, state_dict["model"], options=self.options)
        if self.optimizers:
            set_optimizer_state_dict(
                self.model, self.optimizers, state_dict["optimizer"], options=self.options
            )
        for name in self.stateful:
            if name in state_dict:
                self.stateful[name] = state_dict[name]


def _listed(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
