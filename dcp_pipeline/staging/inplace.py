"""No snapshot: the save reads the caller's tensors themselves."""

from __future__ import annotations

from typing import ClassVar

from dcp_pipeline.staging.base import Stager
from dcp_pipeline.types.entries import Entries

__all__ = ["InplaceStager"]


class InplaceStager(Stager):
    """For synchronous saves, where the caller waits anyway: nothing is copied.

    Tensors on a device are brought to the host slab by slab while they are written.
    """

    is_snapshot: ClassVar[bool] = False

    def stage(self, entries: Entries) -> Entries:
        return entries
