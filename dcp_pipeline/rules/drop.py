"""Takes keys out, or lets them pass as they are."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.rules.base import KeyRule, matches
from dcp_pipeline.rules.keys import Keys

__all__ = ["DropRule", "KeepRule"]


class DropRule(KeyRule):
    """Takes out what any of the globs matches, on the way there and on the way back.

    Args:
        keys: globs on dotted keys, as they are called at this place of the rules.
    """

    kind = "drop"

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)

    def forward(self, keys: Keys) -> None:
        for name in keys.names():
            if matches(name, self._keys):
                keys.replace([name], {}, self.label)

    def backward(self, keys: Keys) -> None:
        self.forward(keys)


class KeepRule(KeyRule):
    """Lets what any of the globs matches pass as it is, which no rule has to take then.

    Args:
        keys: globs on dotted keys, as they are called at this place of the rules.
    """

    kind = "keep"

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)

    def forward(self, keys: Keys) -> None:
        for name in keys.names():
            if matches(name, self._keys):
                keys.update(name, keys[name], self.label)

    def backward(self, keys: Keys) -> None:
        self.forward(keys)
