"""Dictionaries of keys that a stranger has chosen: filling one must not take forever.

Python hashes numbers and tuples of them without a secret, so whoever writes a file can give a
hundred thousand keys one hash, and every one of them is then compared with all before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

from dcp_pipeline.core.errors import UnsafeCheckpointError

__all__ = ["EqualHashes"]

_LIMIT: Final = 256


class EqualHashes:
    """Counts different keys that have the hash of another one; honest keys never do.

    Example:
        >>> EqualHashes().add(range(1000))
        >>> EqualHashes().add(n * (2**61 - 1) for n in range(1000))
        Traceback (most recent call last):
        ...
        dcp_pipeline.core.errors.UnsafeCheckpointError: more than 256 keys have a hash in common: \
they were chosen so that reading them takes forever
    """

    def __init__(self) -> None:
        self._first: dict[int, Hashable] = {}
        self._count = 0

    def add(self, keys: Iterable[Hashable]) -> None:
        """Take keys that are about to go into one dictionary or set, before they do.

        Raises:
            UnsafeCheckpointError: too many have one hash.
        """
        first = self._first
        for key in keys:
            other = first.setdefault(hash(key), key)
            if other is not key and other != key:
                self._count += 1
                if self._count > _LIMIT:
                    raise UnsafeCheckpointError(
                        f"more than {_LIMIT} keys have a hash in common: they were chosen so that"
                        " reading them takes forever"
                    )
