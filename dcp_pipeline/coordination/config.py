"""Configs of the coordinations, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from dcp_pipeline.core.kind import KindConfig

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.coordination.process_group import ProcessGroupCoordination
    from dcp_pipeline.coordination.single_process import SingleProcessCoordination

__all__ = ["ProcessGroupConfig", "SingleProcessConfig"]


class ProcessGroupConfig(KindConfig):
    """All ranks of ``torch.distributed`` agree and commit together, over a gloo group of our own.

    Attributes:
        timeout_seconds: how long a rank waits for the others before it gives up.
        poll_seconds: how often a rank that writes or reads looks whether another one has failed.
    """

    kind: Literal["process_group"] = "process_group"
    timeout_seconds: float = Field(default=1800.0, gt=0, allow_inf_nan=False)
    poll_seconds: float = Field(default=0.5, gt=0, le=5, allow_inf_nan=False)

    @model_validator(mode="after")
    def _polls_before_the_time_is_out(self) -> Self:
        if self.poll_seconds > self.timeout_seconds:
            raise ValueError(
                f"poll_seconds ({self.poll_seconds:g}) is above timeout_seconds "
                f"({self.timeout_seconds:g}), so no poll would ever come in time"
            )
        return self

    def build(self) -> ProcessGroupCoordination:
        """Make the coordination."""
        from dcp_pipeline.coordination.process_group import ProcessGroupCoordination

        return ProcessGroupCoordination(
            timeout_seconds=self.timeout_seconds, poll_seconds=self.poll_seconds
        )


class SingleProcessConfig(KindConfig):
    """One process alone: nothing to agree on."""

    kind: Literal["single_process"] = "single_process"

    def build(self) -> SingleProcessCoordination:
        """Make the coordination."""
        from dcp_pipeline.coordination.single_process import SingleProcessCoordination

        return SingleProcessCoordination()
