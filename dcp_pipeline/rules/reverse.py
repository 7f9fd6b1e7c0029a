"""Rules the other way round."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.rules.base import KeyRule, Rule
from dcp_pipeline.rules.keys import Keys

__all__ = ["ReverseRule"]


class ReverseRule(KeyRule):
    """Rules whose checkpoint is the state, and whose state is the checkpoint.

    Args:
        rules: from the first to the last on the way to what is the state here.
    """

    kind = "reverse"

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)

    def forward(self, keys: Keys) -> None:
        for rule in reversed(self._rules):
            rule.backward(keys)

    def backward(self, keys: Keys) -> None:
        for rule in self._rules:
            rule.forward(keys)
