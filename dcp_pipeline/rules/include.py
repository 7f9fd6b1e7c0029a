"""Leaves out all keys but some."""

from __future__ import annotations

from dcp_pipeline.rules.base import matches
from dcp_pipeline.rules.exclude import ExcludeRule

__all__ = ["IncludeRule"]


class IncludeRule(ExcludeRule):
    """Leaves out what none of the globs matches; takes what ``ExcludeRule`` takes."""

    kind = "include"

    def _is_out(self, key: str) -> bool:
        return not matches(key, self._keys)
