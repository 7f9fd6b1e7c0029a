"""Renames keys by pattern."""

from __future__ import annotations

from collections.abc import Mapping

from dcp_pipeline.rules.base import KeyRule
from dcp_pipeline.rules.keys import Keys
from dcp_pipeline.rules.patterns import Pattern

__all__ = ["RenameRule"]


class RenameRule(KeyRule):
    """Renames whatever one of the patterns matches; the first that does counts.

    Args:
        keys: patterns of names in the state, each with the pattern in the checkpoint.
    """

    kind = "rename"

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._pairs = [(Pattern(here), Pattern(there)) for here, there in keys.items()]

    def forward(self, keys: Keys) -> None:
        self._rename(keys, self._pairs)

    def backward(self, keys: Keys) -> None:
        self._rename(keys, [(there, here) for here, there in self._pairs])

    def _rename(self, keys: Keys, pairs: list[tuple[Pattern, Pattern]]) -> None:
        renamed: dict[str, str] = {}
        for name in keys.names():
            for old, new in pairs:
                bound = old.match(name)
                if bound is not None:
                    renamed[name] = new.format(bound)
                    break
        keys.rename_all(renamed, self.label)
