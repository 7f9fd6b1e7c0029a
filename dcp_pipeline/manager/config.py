"""Config of the manager, torch-free."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from dcp_pipeline.core.kind import KindConfig, Names

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.manager.retention import Retention

__all__ = ["ManagerConfig"]

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _known_signals(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name in _UNCATCHABLE or name not in signal.Signals.__members__:
            raise ValueError(f"expected names of signals such as SIGTERM, found {name!r}")
    return names


class ManagerConfig(KindConfig):
    """When a run saves, what stays of it, and when it stops.

    Attributes:
        save_every_steps: `should_save` is true at steps divisible by it.
        save_every_minutes: `should_save` is true when the last save began so long ago.
        keep_last: how many of the newest whole steps stay; everything where ``None``.
        keep_every: steps divisible by it stay as well.
        keep_best: how many of the best steps by ``metric`` stay as well.
        metric: name in the ``metrics`` of a save.
        mode: whether the ``min`` or the ``max`` of the metric is best.
        overwrite: whether saving a step that is committed is an ``error`` or a ``replace``.
        fallback: whether a restore goes on to the step before one that is damaged or incomplete.
        background_removal: whether steps are deleted by a thread while training goes on.
        stop_signals: names of the signals on which `should_stop` becomes true.
        grace_seconds: from such a signal until the process is expected to be killed.
        heartbeat_seconds: between two renewals of the mark that says whose the root is.
        takeover_seconds: how long the mark of a run that cannot be looked at is watched for
            renewals before it is taken for dead; at least three of that run's heartbeats. The
            other ranks wait meanwhile, so it is less than ``coordination.timeout_seconds``.
    """

    kind: Literal["default"] = "default"
    save_every_steps: Count | None = None
    save_every_minutes: Seconds | None = None
    keep_last: Count | None = None
    keep_every: Count | None = None
    keep_best: Count | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"
    overwrite: Literal["error", "replace"] = "error"
    fallback: bool = True
    background_removal: bool = False
    stop_signals: Annotated[Names, AfterValidator(_known_signals)] = ("SIGTERM",)
    grace_seconds: Seconds = 30.0
    heartbeat_seconds: Seconds = 10.0
    takeover_seconds: Seconds = 30.0

    @model_validator(mode="after")
    def _keeps_something_to_choose_from(self) -> Self:
        if (self.keep_best is None) != (self.metric is None):
            raise ValueError("keep_best and metric go together: best by which metric, and how many")
        if self.keep_last is None and (self.keep_every or self.keep_best):
            raise ValueError(
                "keep_every and keep_best say what stays besides keep_last, without which"
                " everything does; set keep_last"
            )
        return self

    def build(self) -> Retention:
        """Make the policy that says which steps stay."""
        from dcp_pipeline.manager.retention import Retention

        return Retention(
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            mode=self.mode,
        )
