"""Stores tensors in another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcp_pipeline.rules.base import Rule, matches
from dcp_pipeline.rules.keys import Keys

__all__ = ["CastRule"]


class CastRule(Rule):
    """Converts the tensors that any of the globs matches on their way to the checkpoint.

    Args:
        keys: globs on dotted keys, as they are called at this place of the rules.
        dtype: name of the dtype to store; rounding and overflow are PyTorch's.
        back: name of the dtype on the way back; ``None`` for the stored one.
    """

    kind = "cast"

    def __init__(self, keys: Sequence[str], dtype: str, back: str | None = None) -> None:
        self._keys = tuple(keys)
        self._dtype = dtype
        self._back = back

    def forward(self, keys: Keys) -> None:
        self._cast(keys, self._dtype)

    def backward(self, keys: Keys) -> None:
        if self._back is not None:
            self._cast(keys, self._back)

    def _cast(self, keys: Keys, dtype: str) -> None:
        for name in keys.names():
            tensor = keys[name]
            if tensor is not None and tensor.dtype != dtype and matches(name, self._keys):
                keys.change(name, replace(tensor, dtype=dtype))
