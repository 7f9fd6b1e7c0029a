"""What is known of a save whose commit was broken off: a rank was lost, or somebody stopped it."""

from __future__ import annotations

import threading

from dcp_pipeline.core.errors import CheckpointError, CoordinationError
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = ["say_outcome"]

_COMMITTED, _ABORTED = "committed", "aborted"
_LOOK_SECONDS = 5.0


def say_outcome(error: BaseException, job: SaveJob, has_answer: bool) -> None:
    """Put into ``error`` whether the save was committed, as far as this rank can know.

    Also allows this rank to delete what it has written, where nothing can be committed any more.

    Args:
        error: what ended the commit on this rank.
        has_answer: whether the coordinator has said that it has committed.
    """
    if isinstance(error, CheckpointException):
        # All ranks were told how it ended.
        return
    is_committed = _as_coordinator(job) if job.coordinator.is_coordinator else None
    if not job.coordinator.is_coordinator:
        is_committed = True if has_answer else _as_another(error, job)
    location = job.directory.location
    if is_committed:
        sentence = f"The checkpoint is committed: {location} holds it"
    elif is_committed is not None:
        job.may_delete = True
        sentence = f"Nothing was committed: {location} is as it was"
    else:
        sentence = (
            "It is not known whether the save was committed: as far as this rank can see,"
            f" {location} does not hold it at this moment"
        )
    if isinstance(error, CoordinationError):
        error.args = (f"{error.message}. {sentence}", *error.args[1:])
        error.is_committed = is_committed
    else:
        error.add_note(sentence)


def _as_coordinator(job: SaveJob) -> bool | None:
    is_committed = None
    if job.committed is not None:
        is_committed = True
    elif job.give_up():
        is_committed = False
    if is_committed is not None:
        job.coordinator.last_word(_COMMITTED if is_committed else _ABORTED)
    return is_committed


def _as_another(error: BaseException, job: SaveJob) -> bool | None:
    # Whoever was interrupted has no time to wait.
    word = job.coordinator.last_word() if isinstance(error, Exception) else ""
    if word:
        return word == _COMMITTED
    return True if _is_there(job) else None


def _is_there(job: SaveJob) -> bool:
    """Whether the directory holds this save, if it can be read soon."""
    found: list[str | None] = []

    def look() -> None:
        try:
            found.append(job.parts.layout.committed_save(job.directory))
        except (CheckpointError, OSError):
            return

    # What has stopped the coordinator may be the very storage.
    looking = threading.Thread(target=look, name="dcp_pipeline look", daemon=True)
    looking.start()
    looking.join(_LOOK_SECONDS)
    return found == [job.save_id]
