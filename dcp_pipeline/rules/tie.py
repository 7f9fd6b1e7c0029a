"""A tensor that is another one by a second name."""

from __future__ import annotations

from dcp_pipeline.rules.base import KeyRule
from dcp_pipeline.rules.keys import Keys

__all__ = ["TieRule"]


class TieRule(KeyRule):
    """Leaves a tied tensor out of the checkpoint, and has it again in the state.

    Args:
        key: the name that is left out.
        to: the name that stays; both as they are called at this place of the rules.
        write: keep both in the checkpoint, for readers that do not know of the tie.
    """

    kind = "tie"

    def __init__(self, key: str, to: str, write: bool = False) -> None:
        self._key, self._to, self._write = key, to, write

    def forward(self, keys: Keys) -> None:
        if self._key not in keys:
            if self._write and self._to in keys:
                keys.add(self._key, self._to, self.label)
            return
        if self._to in keys and keys[self._key] == keys[self._to]:
            if self._write:
                keys.update(self._key, keys[self._key], self.label)
            else:
                keys.replace([self._key], {}, self.label)
        elif self._write or (keys.is_partial and self._to not in keys):
            keys.update(self._key, keys[self._key], self.label)
        else:
            keys.problems.append(
                f"{self.label}: {self._key!r} does not share its memory with {self._to!r}; left"
                " out, its values would be lost. Set write: true, or take the rule out"
            )

    def backward(self, keys: Keys) -> None:
        if self._key in keys:
            keys.update(self._key, keys[self._key], self.label)
        elif self._to in keys:
            keys.add(self._key, self._to, self.label)
