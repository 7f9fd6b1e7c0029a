"""Nodes ``read`` and ``verify`` of the load: from files into the caller's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import CorruptCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.report import CastRecord
from dcp_pipeline.pipelines.steps.data_files import DataFiles
from dcp_pipeline.pipelines.steps.load_agree import Differences
from dcp_pipeline.pipelines.steps.read_boxes import CastCounts, box_reads
from dcp_pipeline.pipelines.steps.read_items import locate_items
from dcp_pipeline.state.match import Match, take_inside
from dcp_pipeline.state.targets import ValueTarget
from dcp_pipeline.storage.reading import Read

__all__ = ["Fetched", "read", "verify"]

_VERIFY_STEP = 4 << 20


@dataclass(frozen=True)
class Fetched:
    """What was read but is not in its place yet.

    Attributes:
        assignments: path in the state to value.
        loaded: stored names of what was read.
        nbytes: read from storage.
    """

    assignments: dict[Path, Any]
    loaded: list[str]
    nbytes: int


def read(match: Match, differences: Differences, manifest: Manifest, job: LoadJob) -> Fetched:
    """Read everything that the template gets; tensors are filled in place."""
    casts = CastCounts()
    values: dict[int, Any] = {}
    with _open(manifest, job) as files:
        reads = _reads_by_file(manifest, files, match, values, casts, job.rollback.keeper)
        nbytes = files.run(reads)
        job.bytes_read += nbytes
        job.is_verified = files.is_verified
    for overflow in casts.overflows(match.tensors):
        raise overflow
    job.casts = [
        CastRecord(target.name, target.dtype, target.target_dtype, casts.count(target))
        for target in match.tensors
        if target.target_dtype is not None
    ]
    return Fetched(_assignments(match, values, manifest, job), _loaded(match), nbytes)


def verify(match: Match, differences: Differences, manifest: Manifest, job: LoadJob) -> Fetched:
    """Read and check everything that ``read`` is going to read, and keep none of it."""
    with _open(manifest, job) as files:
        reads = _reads_by_file(manifest, files, match, {}, CastCounts(), None)
        blind = {file: list(_blind(parts)) for file, parts in reads.items()}
        nbytes = files.run(blind)
    job.bytes_read += nbytes
    return Fetched({}, [], nbytes)


def _open(manifest: Manifest, job: LoadJob) -> DataFiles:
    return DataFiles(manifest, job.directory, job.parts.storage.thread_count, check=job.check_peers)


def _blind(reads: Sequence[Read]) -> Iterator[Read]:
    for whole in reads:
        for begin in range(0, whole.length, _VERIFY_STEP):
            yield Read(whole.offset + begin, min(_VERIFY_STEP, whole.length - begin), whole.key)


def _loaded(match: Match) -> list[str]:
    return sorted({t.name for t in match.tensors} | {v.name for v in match.values})


def _assignments(
    match: Match, values: dict[int, Any], manifest: Manifest, job: LoadJob
) -> dict[Path, Any]:
    serialization = job.parts.serialization_of(manifest.serialization)
    assignments: dict[Path, Any] = dict(match.made)
    decoded: dict[int, Any] = {}
    for target in match.tensors:
        if target.path is not None and target.value is not None:
            assignments[target.path] = target.value()
    for wanted in match.values:
        if wanted.key not in decoded or not wanted.inside:
            # Decoded anew for every place, so that no two places share a list.
            decoded[wanted.key] = serialization.decode_value(values[wanted.key])
        _take(wanted, decoded[wanted.key], assignments, job)
    return assignments


def _take(target: ValueTarget, value: Any, assignments: dict[Path, Any], job: LoadJob) -> None:
    try:
        part = target.convert(take_inside(value, target.inside))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{target.name!r} was stored as one value, which has nothing at {target.inside}"
        ) from error
    if target.target is None:
        assignments[target.path] = part
        return
    if tuple(part.shape) != tuple(target.target.shape) or part.dtype != target.target.dtype:
        raise CorruptCheckpointError(
            f"{target.name!r} holds {part.dtype} {list(part.shape)} at {target.inside}, wanted is"
            f" {target.target.dtype} {list(target.target.shape)}"
        )
    job.rollback.keep(target.target)
    target.target.detach().copy_(part)


def _value_read(key: int, name: str, table: Any, row: int, values: dict[int, Any]) -> Read:
    def deliver(data: memoryview) -> None:
        values[key] = bytes(data)

    offset = int(table.offset[row] + table.payload[row])
    return Read(offset, int(table.length[row] - table.payload[row]), name, deliver=deliver)


def _reads_by_file(
    manifest: Manifest,
    files: DataFiles,
    match: Match,
    values: dict[int, Any],
    casts: CastCounts,
    keep: Callable[[Any], None] | None,
) -> dict[int, list[Read]]:
    """The reads of every file; ``values`` is filled by them with the bytes of values."""
    located = locate_items(manifest, match, files.source)
    table = located.table
    starts = np.searchsorted(table.key, np.arange(len(table.keys) + 1))
    reads: dict[int, list[Read]] = {}
    for target in match.tensors:
        rows = range(int(starts[target.key]), int(starts[target.key + 1]))
        for file, part in box_reads(located, rows, target, casts, keep):
            reads.setdefault(file, []).append(part)
    for key in {target.key for target in match.values}:
        row = int(starts[key])
        part = _value_read(key, manifest.names[key], table, row, values)
        reads.setdefault(int(table.file[row]), []).append(part)
    return reads
