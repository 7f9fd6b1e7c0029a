"""Configs of the stagers, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dcp_pipeline.core.kind import KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.staging.host import HostStager, PinnedStager, SharedStager
    from dcp_pipeline.staging.inplace import InplaceStager

__all__ = ["HostStagerConfig", "InplaceStagerConfig", "PinnedStagerConfig", "SharedStagerConfig"]


class InplaceStagerConfig(KindConfig):
    """No copy: a save writes the values from where they lie.

    An asynchronous save needs a snapshot all the same, and takes one as ``host`` (``pinned`` where
    there is a device), or as ``shared`` for a background process.
    """

    kind: Literal["inplace"] = "inplace"

    def build(self) -> InplaceStager:
        """Make the stager."""
        from dcp_pipeline.staging.inplace import InplaceStager

        return InplaceStager()


class HostStagerConfig(KindConfig):
    """A snapshot in host memory, in buffers that are kept from one save to the next."""

    kind: Literal["host"] = "host"

    def build(self) -> HostStager:
        """Make the stager."""
        from dcp_pipeline.staging.host import HostStager

        return HostStager()


class PinnedStagerConfig(KindConfig):
    """A snapshot in page-locked host memory, copied from the device on a stream of its own.

    Attributes:
        overlap: what the training queues on the device after the call runs beside the copies. The
            training must then wait for ``staging_completion`` before it changes the state. Off, the
            device finishes the copies first, and the processor goes on either way.
    """

    kind: Literal["pinned"] = "pinned"
    overlap: bool = False

    def build(self) -> PinnedStager:
        """Make the stager."""
        from dcp_pipeline.staging.host import PinnedStager

        return PinnedStager(self.overlap)


class SharedStagerConfig(KindConfig):
    """A snapshot in memory that a background process maps, without a second copy."""

    kind: Literal["shared"] = "shared"

    def build(self) -> SharedStager:
        """Make the stager."""
        from dcp_pipeline.staging.host import SharedStager

        return SharedStager()
