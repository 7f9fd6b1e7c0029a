"""What changes keys and tensors on their way: the interface of a kind of rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fnmatch import fnmatchcase

from dcp_pipeline.rules.keys import Keys

__all__ = ["KeyRule", "Rule", "matches"]


def matches(key: str, globs: Sequence[str]) -> bool:
    """Whether any of ``globs`` matches the dotted ``key``.

    A glob that is a section's whole name covers everything below it.

    >>> [matches(key, ["model.*", "lr"]) for key in ("model.head.bias", "lr", "lr.0", "lr_0")]
    [True, True, True, False]
    """
    return any(fnmatchcase(key, glob) or key.startswith(f"{glob}.") for glob in globs)


class Rule(ABC):
    """A kind of rule.

    Forward leads from the caller's state to the checkpoint, as a save goes; backward from the
    checkpoint to the state. A rule works on names and :class:`~dcp_pipeline.core.affine.Mapped`
    tensors alone; no element is touched. What it cannot do it adds to ``keys.problems``.

    Attributes:
        name: what a recipe's map calls it, empty where it has no name.
    """

    kind: str
    name: str = ""

    @property
    def label(self) -> str:
        """How messages call it."""
        return f"{self.name} ({self.kind})" if self.name else self.kind

    @abstractmethod
    def forward(self, keys: Keys) -> None:
        """Change the keys on their way to the checkpoint."""

    @abstractmethod
    def backward(self, keys: Keys) -> None:
        """Change the keys on their way to the state."""

    def wants(self, key: str) -> bool:
        """Whether a load should touch a key of the state at all."""
        return True


class KeyRule(Rule):
    """A rule that says what a key of one side is on the other.

    Where there is one, every key has to be taken by such a rule: one that all of them forget is an
    error.
    """
