"""A tensor of one value that the checkpoint has and the state has not."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.core.affine import constant
from dcp_pipeline.rules.base import KeyRule
from dcp_pipeline.rules.keys import Keys

__all__ = ["ConstantRule"]


class ConstantRule(KeyRule):
    """Adds a tensor to the checkpoint, and leaves it out on the way back.

    Args:
        key: its name at this place of the rules.
        shape: of it.
        dtype: name of its element type.
        value: of every element.
        side: ``checkpoint`` where the checkpoint has it and the state does not, or ``state``.
    """

    kind = "constant"

    def __init__(
        self, key: str, shape: Sequence[int], dtype: str, value: float, side: str = "checkpoint"
    ) -> None:
        self._key, self._side = key, side
        self._tensor = constant(dtype, shape, value)

    def forward(self, keys: Keys) -> None:
        self._act(keys, adds=self._side == "checkpoint")

    def backward(self, keys: Keys) -> None:
        self._act(keys, adds=self._side == "state")

    def _act(self, keys: Keys, adds: bool) -> None:
        if adds:
            keys.replace([], {self._key: self._tensor}, self.label)
        elif self._key in keys:
            keys.replace([self._key], {}, self.label)
