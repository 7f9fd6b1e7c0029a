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
    """

    is_snapshot: ClassVar[bool]

    @abstractmethod
    def stage(self, entries: Entries) -> Entries:
        """The same entries over memory that the rest of the save may read.

        Only the bytes of each piece are taken, not the storage behind it, and memory that several
        entries share is taken once. The result is valid until the next call.
        """

    def close(self) -> None:
        """Give back buffers."""
        return None
