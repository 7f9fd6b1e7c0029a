"""Nodes ``settle`` and ``apply`` of the load: everybody has everything, or nothing has changed."""

from __future__ import annotations

from dcp_pipeline.core.errors import CheckpointError, RollbackFailedError
from dcp_pipeline.graph.runner import is_shared
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.steps.load_again import raise_if_replaced
from dcp_pipeline.pipelines.steps.load_read import Fetched
from dcp_pipeline.pipelines.steps.put_in_place import put_in_place
from dcp_pipeline.state.flatten import FlatState
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = ["apply", "settle", "settle_verify"]


def settle_verify(verified: Fetched | None, job: LoadJob, failure: BaseException | None) -> None:
    """Go on only if every rank could verify what it is going to read."""
    _agree_or_undo("settle verify", None, job, failure)


def settle(
    template: FlatState | None,
    fetched: Fetched | None,
    job: LoadJob,
    failure: BaseException | None,
) -> bool:
    """Go on only if every rank has read everything; else put all tensors back."""
    _agree_or_undo("settle", template, job, failure)
    return True


def apply(
    template: FlatState | None,
    fetched: Fetched | None,
    settled: bool | None,
    job: LoadJob,
    failure: BaseException | None,
) -> bool:
    """Put values in their places and let ``Stateful`` objects take their state."""
    if failure is None and template is not None and fetched is not None:
        try:
            put_in_place(template, fetched.assignments, job.rollback)
        except Exception as error:
            error.__dict__.setdefault("node", "apply")
            failure = error
    _agree_or_undo("apply", template, job, failure)
    return True


def _agree_or_undo(
    step: str, template: FlatState | None, job: LoadJob, failure: BaseException | None
) -> None:
    try:
        job.coordinator.exchange(step, failure or b"")
    except CheckpointException as error:
        _undo(template, job, error)
        raise_if_replaced(job, error)
        raise
    except CheckpointError as error:
        # The others cannot be asked any more: what can be done here is done.
        problem = _undone(template, job, error)
        if problem is None:
            raise
        raise problem from error


def _undo(template: FlatState | None, job: LoadJob, error: CheckpointError) -> None:
    job.coordinator.exchange("rollback", _undone(template, job, error) or b"")


def _undone(
    template: FlatState | None, job: LoadJob, error: CheckpointError
) -> RollbackFailedError | None:
    """Put everything back after ``error``; what could not be."""
    try:
        job.rollback.run(template)
    except RollbackFailedError as failed:
        # Whoever has to start anew from this wants to know both.
        problem = RollbackFailedError(f"{failed}\nThe load had failed: {error}")
        problem.__cause__ = error
        problem.is_shared = is_shared(error)
        return problem
    return None
