"""Stores tensors in another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dcp_pipeline.core.path import dotted
from dcp_pipeline.rules.base import Rule, matches
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Entries, Entry

__all__ = ["CastRule"]


class CastRule(Rule):
    """Converts the tensors that any of the globs matches before they are staged.

    Args:
        keys: globs on dotted keys.
        dtype: name of the dtype to store; rounding and overflow are PyTorch's.
    """

    kind = "cast"
    acts_on_save = True

    def __init__(self, keys: Sequence[str], dtype: str) -> None:
        self._keys = tuple(keys)
        self._dtype = dtype

    def on_save(self, entries: Entries) -> Entries:
        is_cast = [self._changes(entry) for entry in entries]
        return Entries(
            self._converted(entry, changes, entry.alias >= 0 and is_cast[entry.alias])
            for entry, changes in zip(entries, is_cast, strict=True)
        )

    def _changes(self, entry: Entry) -> bool:
        if entry.dtype in (None, self._dtype):
            return False
        return matches(dotted(entry.path), self._keys)

    def _converted(self, entry: Entry, changes: bool, changes_shared: bool) -> Entry:
        # Memory is shared as long as both sides of a tie are converted, or neither.
        alias = entry.alias if changes == changes_shared else -1
        if not changes:
            return replace(entry, alias=alias) if alias != entry.alias else entry
        target = DTYPES[self._dtype]
        pieces = tuple(replace(piece, data=piece.data.to(target)) for piece in entry.pieces)
        return replace(entry, dtype=self._dtype, pieces=pieces, alias=alias)
