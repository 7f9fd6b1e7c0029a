"""Leaves keys out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dcp_pipeline.core.path import dotted
from dcp_pipeline.rules.base import Rule, matches
from dcp_pipeline.types.entries import Entries

__all__ = ["ExcludeRule"]


class ExcludeRule(Rule):
    """Leaves out what any of the globs matches; a load keeps what the caller has there.

    Args:
        keys: globs on dotted keys.
        on: whether saves, loads or both leave it out.
    """

    kind = "exclude"

    def __init__(self, keys: Sequence[str], on: Literal["save", "load", "both"] = "both") -> None:
        self._keys = tuple(keys)
        self.acts_on_save = on != "load"
        self.acts_on_load = on != "save"

    def on_save(self, entries: Entries) -> Entries:
        return entries.keeping([self.wants(dotted(entry.path)) for entry in entries])

    def wants(self, key: str) -> bool:
        return not matches(key, self._keys)
