"""Whether a load that failed is to start again, since another save has replaced the checkpoint."""

from __future__ import annotations

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = ["Replaced", "raise_if_replaced"]


class Replaced(Exception):
    """The checkpoint was replaced while it was read: the load starts again, on every rank."""

    is_shared = True


def raise_if_replaced(job: LoadJob, error: CheckpointException) -> None:
    """Raise :class:`Replaced` if there is another checkpoint than the one that was opened.

    All ranks ask this together, after an error that they share.
    """

    def look(messages: list[bytes]) -> list[bytes]:
        try:
            now = job.parts.layout.open(job.directory).save_id
        except CheckpointError:
            now = None
        replaced = job.manifest is not None and now not in (None, job.manifest.save_id)
        return [b"1" if replaced else b"0"] * len(messages)

    if job.coordinator.exchange("look again", b"", look) == b"1":
        raise Replaced from error
