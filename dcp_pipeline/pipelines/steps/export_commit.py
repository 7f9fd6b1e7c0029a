"""The coordinator's part of the commit of an export: headers, final names, and the record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dcp_pipeline.core.contributions import fingerprints_of
from dcp_pipeline.core.errors import CheckpointError, CoordinationError, FormatError
from dcp_pipeline.core.fingerprint import Fingerprint, make_fingerprint
from dcp_pipeline.core.framing import unframe
from dcp_pipeline.core.manifest import FileEntry, Manifest
from dcp_pipeline.core.table import ChunkTable, KeySpec
from dcp_pipeline.layout.export import ExportLayout, PlannedFile, Publication, part_name
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.planning.base import GlobalPlan
from dcp_pipeline.storage.base import Directory

__all__ = ["exported", "fill_headers", "is_published", "shared_manifest"]


def shared_manifest(
    messages: Sequence[bytes], job: SaveJob, versions: Mapping[str, str]
) -> Manifest:
    """What the files that the ranks have written together hold, if the receipts fit the plan.

    Raises:
        FormatError: a rank has not written what was planned for it.
    """
    assert job.plan is not None and job.plan.plan is not None
    plan = job.plan.plan
    planned = np.bincount(plan.table.owner, minlength=len(messages))
    words: list[bytes] = []
    seconds: list[float] = []
    for rank, message in enumerate(messages):
        header, (_, *rest) = unframe(message)
        words += rest
        seconds.append(header["seconds"])
        if rest and len(rest[0]) != 8 * planned[rank]:
            raise FormatError(f"rank {rank} has not written the {planned[rank]} planned chunks")
    job.slowest_writer = max(zip(seconds, range(len(seconds)), strict=True))[::-1]
    fingerprint = _fingerprint(plan, words) if words else None
    manifest = exported(plan.names, plan.table.keys, job, versions)
    return replace(manifest, fingerprint=fingerprint)


def exported(
    names: Sequence[str], specs: Sequence[KeySpec], job: SaveJob, versions: Mapping[str, str]
) -> Manifest:
    """What the files that were planned for all ranks hold."""
    assert job.plan is not None
    files = job.plan.files
    return Manifest(
        save_id=job.save_id,
        created=time.time(),
        world_size=job.coordinator.world_size,
        serialization=job.parts.serialization.kind,
        layout=job.parts.layout.kind,
        names=tuple(names),
        table=_whole_tensors(specs, files),
        files=tuple(FileEntry(file.final, file.size) for file in files),
        versions=versions,
        config=job.parts.recorded_config(),
        notes=job.notes,
    )


def _whole_tensors(specs: Sequence[KeySpec], files: Sequence[PlannedFile]) -> ChunkTable:
    rows = [
        (key, number, start)
        for number, file in enumerate(files)
        for key, start in zip(file.keys, file.starts, strict=True)
        if 0 not in specs[key].shape
    ]
    keys = [key for key, _, _ in rows]
    shapes = [specs[key].shape for key in keys]
    table = ChunkTable.build(specs, keys, [(0,) * len(shape) for shape in shapes], shapes)
    return replace(
        table,
        file=np.asarray([number for _, number, _ in rows], np.int64),
        offset=np.asarray([start for _, _, start in rows], np.int64),
        length=table.nbytes,
        payload=np.zeros(len(rows), np.int64),
    ).sort()


def _fingerprint(plan: GlobalPlan, words: list[bytes]) -> Fingerprint:
    parts = np.frombuffer(b"".join(words), "<u8")
    keys = plan.table.keys
    return make_fingerprint(plan.names, keys, fingerprints_of(plan.table, parts))


def fill_headers(job: SaveJob, layout: ExportLayout, manifest: Manifest) -> dict[str, str]:
    """Write what stands in front of the elements, the last bytes that the files lack.

    Returns:
        The name that each file has until the commit, by final name; attachments among them.
    """
    assert job.plan is not None
    files = {file.final: file.part for file in job.plan.files}
    for file in job.plan.files:
        header = layout.header(
            file, manifest.names, manifest.table.keys, job.save_id, manifest.fingerprint
        )
        job.written.append(file.part)
        with job.directory.open_ranges(file.part, file.size) as writer:
            writer.write(0, memoryview(header))
    for final, data in layout.attachments():
        part = part_name(final, job.save_id)
        job.written.append(part)
        job.directory.put(part, data)
        files[final] = part
    job.directory.sync()
    return files


def is_published(
    directory: Directory, publication: Publication, tokens: dict[str, str | None], uncertain: str
) -> bool:
    """Whether a commit that raised was made.

    Args:
        tokens: of the files before, by the names that they had then.

    Raises:
        CoordinationError: that cannot be told, so nothing may be deleted.
    """
    try:
        if publication.record is not None:
            name, data = publication.record
            return directory.exists(name) and directory.read(name) == data
        part, final = publication.files[-1]
        return directory.token(final) == tokens[part]
    except CheckpointError as error:
        raise CoordinationError(f"{uncertain}: {error}") from error
