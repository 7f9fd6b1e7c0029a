"""What changes keys and tensors on their way: the interface of a kind of rule."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from fnmatch import fnmatchcase

from dcp_pipeline.types.entries import Entries

__all__ = ["Rule", "matches"]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Whether any of ``globs`` matches the dotted ``key``.

    >>> matches("model.head.bias", ["model.*"])
    True
    """
    return any(fnmatchcase(key, glob) for glob in globs)


class Rule(ABC):
    """A kind of rule. A rule says what it does to a save, what to a load, or both."""

    kind: str
    acts_on_save: bool = False
    acts_on_load: bool = False

    def on_save(self, entries: Entries) -> Entries:
        """The entries that go on to be saved."""
        return entries

    def wants(self, key: str) -> bool:
        """Whether a load should touch a dotted key at all."""
        return True
