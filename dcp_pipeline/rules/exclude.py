"""Leaves keys out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dcp_pipeline.rules.base import Rule, matches
from dcp_pipeline.rules.keys import Keys

__all__ = ["ExcludeRule"]


class ExcludeRule(Rule):
    """Leaves out what any of the globs matches; a load keeps what the caller has there.

    Args:
        keys: globs on dotted keys, as they are called at this place of the rules.
        on: whether saves, loads or both leave it out.
    """

    kind = "exclude"

    def __init__(self, keys: Sequence[str], on: Literal["save", "load", "both"] = "both") -> None:
        self._keys = tuple(keys)
        self._on = on

    def forward(self, keys: Keys) -> None:
        if self._on != "load":
            self._leave_out(keys)

    def backward(self, keys: Keys) -> None:
        if self._on != "save":
            self._leave_out(keys)

    def wants(self, key: str) -> bool:
        return self._on == "save" or not self._is_out(key)

    def _leave_out(self, keys: Keys) -> None:
        for name in keys.names():
            if self._is_out(name):
                keys.replace([name], {}, self.label)

    def _is_out(self, key: str) -> bool:
        return matches(key, self._keys)
