"""Nodes ``read`` and ``verify`` of the load: from files into the caller's tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import ChecksumError, CorruptCheckpointError, PeerFailedError
from dcp_pipeline.core.manifest import Manifest, SumsEntry
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.sums import BlockSums, parse_sums, sums_digest
from dcp_pipeline.layout.names import sums_name
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.report import CastRecord
from dcp_pipeline.pipelines.steps.load_agree import Differences
from dcp_pipeline.pipelines.steps.read_boxes import CastCounts, box_reads
from dcp_pipeline.pipelines.steps.read_items import locate_items
from dcp_pipeline.state.match import Match, take_inside
from dcp_pipeline.state.targets import ValueTarget
from dcp_pipeline.storage.base import Source
from dcp_pipeline.storage.reading import Read, read_ranges

__all__ = ["Fetched", "read", "verify"]

_TASK_BYTES = 32 << 20
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
    with _Files(manifest, job) as files:
        reads = files.by_file(match, values, casts, job.rollback.keep)
        job.bytes_read += files.run(reads)
    for overflow in casts.overflows(match.tensors):
        raise overflow
    job.casts = [
        CastRecord(target.name, target.dtype, target.target_dtype, casts.count(target))
        for target in match.tensors
        if target.target_dtype is not None
    ]
    return Fetched(_assignments(match, values, job), _loaded(match), job.bytes_read)


def verify(match: Match, differences: Differences, manifest: Manifest, job: LoadJob) -> bool:
    """Read and check everything that ``read`` is going to read, and keep none of it."""
    with _Files(manifest, job) as files:
        reads = files.by_file(match, {}, CastCounts(), lambda tensor: None)
        blind = {file: list(_blind(parts)) for file, parts in reads.items()}
        job.bytes_read += files.run(blind)
    return True


def _blind(reads: Sequence[Read]) -> Iterator[Read]:
    for whole in reads:
        for begin in range(0, whole.length, _VERIFY_STEP):
            yield Read(whole.offset + begin, min(_VERIFY_STEP, whole.length - begin), whole.key)


def _loaded(match: Match) -> list[str]:
    return sorted({t.name for t in match.tensors} | {v.name for v in match.values})


def _assignments(match: Match, values: dict[int, Any], job: LoadJob) -> dict[Path, Any]:
    assignments: dict[Path, Any] = dict(match.made)
    decoded: dict[int, Any] = {}
    for target in match.tensors:
        if target.path is not None and target.value is not None:
            assignments[target.path] = target.value()
    for wanted in match.values:
        if wanted.key not in decoded or not wanted.inside:
            # Decoded anew for every place, so that no two places share a list.
            decoded[wanted.key] = job.parts.serialization.decode_value(values[wanted.key])
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


class _Files:
    """The data files of a checkpoint and their digests, opened as they are needed."""

    def __init__(self, manifest: Manifest, job: LoadJob) -> None:
        self._manifest = manifest
        self._job = job
        self._sources: dict[int, Source] = {}
        self._sums: dict[str, dict[str, BlockSums]] = {}
        self._sums_entries = {entry.name: entry for entry in manifest.sums}
        self._lock = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources.values():
            source.close()

    def source(self, file: int) -> Source:
        with self._lock:
            if file not in self._sources:
                self._sources[file] = self._job.directory.open(self._manifest.files[file].name)
            return self._sources[file]

    def sums(self, file: int) -> BlockSums | None:
        """The digests of a data file; ``None`` for a checkpoint without digests."""
        if self._manifest.checksum is None:
            self._job.is_verified = False
            return None
        entry = self._manifest.files[file]
        rank = int(entry.name[2:].split("_")[0])
        name = sums_name(rank, self._manifest.save_id)
        with self._lock:
            if name not in self._sums:
                self._sums[name] = self._read_sums(name)
            sums = self._sums[name].get(entry.name)
        if sums is None or sums.size != entry.size:
            raise CorruptCheckpointError(f"{name} does not cover {entry.name} as it was written")
        return sums

    def _read_sums(self, name: str) -> dict[str, BlockSums]:
        entry: SumsEntry | None = self._sums_entries.get(name)
        if entry is None:
            raise CorruptCheckpointError(f"the manifest does not list {name}")
        data = self._job.directory.read(name)
        assert self._manifest.checksum is not None
        if len(data) != entry.size or sums_digest(self._manifest.checksum, data) != entry.digest:
            raise ChecksumError(
                f"{name} is damaged, or belongs to another save: it does not match its digest in the"
                " manifest"
            )
        return parse_sums(data)

    def by_file(
        self,
        match: Match,
        values: dict[int, Any],
        casts: CastCounts,
        keep: Callable[[Any], None],
    ) -> dict[int, list[Read]]:
        """The reads of every file; ``values`` is filled by them with the bytes of values."""
        table = locate_items(self._manifest, match, self.source)
        starts = np.searchsorted(table.key, np.arange(len(table.keys) + 1))
        reads: dict[int, list[Read]] = {}
        for target in match.tensors:
            rows = range(int(starts[target.key]), int(starts[target.key + 1]))
            if not target.is_fresh:
                for piece in target.pieces:
                    keep(piece.data)
            for file, part in box_reads(table, rows, target, casts):
                reads.setdefault(file, []).append(part)
        for key in {target.key for target in match.values}:
            row = int(starts[key])
            part = _value_read(key, self._manifest.names[key], table, row, values)
            reads.setdefault(int(table.file[row]), []).append(part)
        return reads

    def run(self, reads: dict[int, list[Read]]) -> int:
        """Do all reads with the storage's threads; the bytes read."""
        tasks = [(file, part) for file in sorted(reads) for part in _tasks(reads[file])]
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise PeerFailedError("another thread of this rank has failed")
            self._job.check_peers()

        def run_one(task: tuple[int, list[Read]]) -> int:
            try:
                file, part = task
                return read_ranges(self.source(file), self.sums(file), part, check)
            except BaseException:
                stop.set()
                raise

        threads = min(self._job.parts.storage.thread_count, len(tasks))
        if threads <= 1:
            return sum(map(run_one, tasks))
        with ThreadPoolExecutor(threads, "dcp_pipeline read") as pool:
            futures = [pool.submit(run_one, task) for task in tasks]
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, PeerFailedError)]
        if errors:
            raise (causes or errors)[0]
        return sum(future.result() for future in futures)


def _value_read(key: int, name: str, table: Any, row: int, values: dict[int, Any]) -> Read:
    def deliver(data: memoryview) -> None:
        values[key] = bytes(data)

    offset = int(table.offset[row] + table.payload[row])
    return Read(offset, int(table.length[row] - table.payload[row]), name, deliver=deliver)


def _tasks(reads: list[Read]) -> Iterator[list[Read]]:
    """Runs of neighbouring reads, so that several threads can share a file."""
    task: list[Read] = []
    nbytes = 0
    for part in sorted(reads, key=lambda read: read.offset):
        task.append(part)
        nbytes += part.length
        if nbytes >= _TASK_BYTES:
            yield task
            task, nbytes = [], 0
    if task:
        yield task
