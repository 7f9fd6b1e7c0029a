"""What changes keys and tensors on their way: the interface of a kind of rule."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from fnmatch import fnmatchcase

from dcp_pipeline.types.entries import Entries

__all__ = ["Rule", "matches"]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Whether any of ``globs`` matches the dotted ``key``.

    A glob that is a section's whole name covers everything below it.

    >>> [matches(key, ["model.*", "lr"]) for key in ("model.head.bias", "lr", "lr.0", "lr_0")]
    [True, True, True, False]
    """
    return any(fnmatchcase(key, glob) or key.startswith(f"{glob}.") for glob in globs)


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
