"""The stagers that take a snapshot: in plain, pinned or shared host memory."""

from __future__ import annotations

from dcp_pipeline.staging.arena import ArenaStager
from dcp_pipeline.staging.copies import Copies
from dcp_pipeline.staging.memory import HostMemory, PinnedMemory, SharedMemory

__all__ = ["HostStager", "PinnedStager", "SharedStager"]


class HostStager(ArenaStager):
    """A snapshot in ordinary memory."""

    def __init__(self) -> None:
        super().__init__(HostMemory())


class PinnedStager(ArenaStager):
    """A snapshot in page-locked memory, which a device fills without the processor.

    Args:
        overlap: see :class:`Copies`.
    """

    def __init__(self, overlap: bool = False) -> None:
        super().__init__(PinnedMemory(), Copies(overlaps=overlap))
        self.is_asynchronous = overlap


class SharedStager(ArenaStager):
    """A snapshot in memory that a background process maps: it is written without a second copy."""

    def __init__(self) -> None:
        super().__init__(SharedMemory())
