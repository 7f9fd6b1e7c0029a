"""Configs of the stagers, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dcp_pipeline.core.kind import KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.staging.host import HostStager
    from dcp_pipeline.staging.inplace import InplaceStager

__all__ = ["HostStagerConfig", "InplaceStagerConfig"]


class InplaceStagerConfig(KindConfig):
    """No copy: the values are written from where they lie, so the save must be synchronous."""

    kind: Literal["inplace"] = "inplace"

    def build(self) -> InplaceStager:
        """Make the stager."""
        from dcp_pipeline.staging.inplace import InplaceStager

        return InplaceStager()


class HostStagerConfig(KindConfig):
    """A copy in host memory, in buffers that are kept from one save to the next."""

    kind: Literal["host"] = "host"

    def build(self) -> HostStager:
        """Make the stager."""
        from dcp_pipeline.staging.host import HostStager

        return HostStager()
