"""Values that are small in memory and endless as text, since their parts are shared.

A list of twice the same list of twice the same list, ninety deep, is a kilobyte in a pickle.
Whatever walks it as a tree never ends.
"""

from __future__ import annotations

from typing import Any, Final

from dcp_pipeline.core.errors import UnsafeCheckpointError

__all__ = ["LONG_TEXT", "Sharing", "is_endless"]

LONG_TEXT: Final = 64
"""Shorter text counts as one part."""

_FREE_PARTS, _FREE_BYTES, _RATIO = 20_000, 32 << 20, 16
_BYTES_PER_PART = 8  # a part is a pointer in the container that holds it


class Sharing:
    """Counts what a value holds, and how much of it a walk as a tree comes by again."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._parts = self._parts_again = 0
        self._bytes = self._bytes_again = 0

    def add(self, part: Any, is_text: bool) -> None:
        """A container, or text longer than ``LONG_TEXT``, that the walk has come to.

        The caller keeps ``part`` alive for as long as this counts.

        Raises:
            UnsafeCheckpointError: the walk has come by the same parts so often that written out
                they would be out of proportion to what the value holds.
        """
        size = len(part) + 1
        if id(part) not in self._seen:
            self._seen.add(id(part))
            if is_text:
                self._bytes += size
            else:
                self._parts += size
            return
        if is_text:
            self._bytes_again += size
        else:
            self._parts_again += size
        held = self._bytes + _BYTES_PER_PART * self._parts
        if (
            self._parts_again > _FREE_PARTS + _RATIO * self._parts
            or self._bytes_again > _FREE_BYTES + _RATIO * held
        ):
            raise UnsafeCheckpointError(
                "a value that holds itself, or shares its parts so often that they would be"
                f" endless as text ({self._parts} parts and {self._bytes} bytes of text)"
            )


def is_endless(value: Any) -> bool:
    """Whether a walk of plain containers would come by the same parts too often.

    Example:
        >>> is_endless([[1, 2]] * 1000)
        False
        >>> shared = [1]
        >>> for _ in range(90):
        ...     shared = [shared, shared]
        >>> is_endless(shared)
        True
    """
    sharing = Sharing()
    todo = [value]
    try:
        while todo:
            part = todo.pop()
            if isinstance(part, (str, bytes, bytearray)):
                if len(part) > LONG_TEXT:
                    sharing.add(part, True)
            elif isinstance(part, dict):
                sharing.add(part, False)
                todo += part.keys()
                todo += part.values()
            elif isinstance(part, (list, tuple, set, frozenset)):
                sharing.add(part, False)
                todo += part
    except UnsafeCheckpointError:
        return True
    return False
