"""What takes the device-to-host snapshot: the interface of a kind of stager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from dcp_pipeline.types.entries import Entries

__all__ = ["Stager"]


class Stager(ABC):
    """A kind of stager.

    Attributes:
        is_snapshot: whether what :meth:`stage` returns stays as it is while training goes on.
        is_asynchronous: whether copies go on after :meth:`stage` returns, so that the caller must
            not change the state until they are done.
    """

    is_snapshot: ClassVar[bool]
    is_asynchronous: bool = False

    @abstractmethod
    def stage(self, entries: Entries) -> Entries:
        """The same entries over memory that the rest of the save may read.

        Only the bytes of each piece are taken, not the storage behind it, and memory that several
        entries share is taken once. The result is valid until it is released.
        """

    def release(self, staged: Entries) -> None:
        """What :meth:`stage` gave is not read any more; its memory may be used again."""
        return None

    def close(self) -> None:
        """Give back buffers."""
        return None
