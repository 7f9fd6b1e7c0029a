"""Node ``share`` of the load: which rank reads which blocks, so that none is read twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.packing import Column, pack_columns, unpack_columns
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.steps.data_files import DataFiles
from dcp_pipeline.pipelines.steps.load_again import raise_if_replaced
from dcp_pipeline.pipelines.steps.load_agree import Differences
from dcp_pipeline.pipelines.steps.read_boxes import CastCounts, box_reads
from dcp_pipeline.pipelines.steps.read_items import locate_items
from dcp_pipeline.pipelines.steps.read_mapped import Constant, mapped_reads
from dcp_pipeline.state.match import Match
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = ["ReadPlan", "Segment", "open_files", "share"]

_SEGMENT_BYTES = 1 << 20
_SMALLEST_SHARED = 256 << 10
_MASK_BITS = 60
_TOLERATED = 1.05
_AUTO_REPLICAS = 8

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Whole blocks of a file that several ranks need.

    Attributes:
        file: number in the manifest.
        begin, end: bytes.
        reader: the rank that reads it and passes it on.
        needers: the ranks that need it, the reader among them.
    """

    file: int
    begin: int
    end: int
    reader: int
    needers: tuple[int, ...]


@dataclass(frozen=True)
class ReadPlan:
    """What one rank reads.

    Attributes:
        reads: of each file, everything that this rank's targets need.
        segments: what is read by one rank and passed on, the same list on every rank.
        values: filled with the stored bytes of values by the reads.
        casts: filled with what did not fit by the reads.
        constants: what is filled in once all is read.
    """

    reads: dict[int, list[Read]]
    segments: list[Segment]
    values: dict[int, bytes] = field(default_factory=dict)
    casts: CastCounts = field(default_factory=CastCounts)
    constants: list[Constant] = field(default_factory=list)


def open_files(manifest: Manifest, job: LoadJob) -> DataFiles:
    """The data files of a checkpoint, for this load."""
    thread_count = job.parts.storage.thread_count
    if job.rollback.copies:
        # Most of their time they copy old values, while storage has nothing to do.
        thread_count *= 4
    return DataFiles(manifest, job.directory, thread_count, check=job.check_peers)


def block_bytes(manifest: Manifest) -> int:
    """What is read at a time at least."""
    return manifest.block_bytes or 4096


def share(
    match: Match | None,
    differences: Differences | None,
    manifest: Manifest | None,
    job: LoadJob,
    failure: BaseException | None,
) -> ReadPlan:
    """Work out this rank's reads, and agree on those that several ranks have in common."""
    plan = ReadPlan({}, [])
    message: bytes | BaseException = failure or b""
    if failure is None and match is not None and manifest is not None:
        try:
            with open_files(manifest, job) as files:
                for file, read in _all_reads(manifest, files, match, plan, job.rollback.keeper):
                    plan.reads.setdefault(file, []).append(read)
            message = _describe(plan, manifest, match.stored_bytes(manifest.quantized))
        except Exception as error:
            error.__dict__.setdefault("node", "share")
            message = error
    try:
        answer = job.coordinator.exchange("share", message, lambda messages: _decide(messages, job))
    except CheckpointException as error:
        raise_if_replaced(job, error)
        raise
    if answer:
        assert manifest is not None
        plan.segments.extend(_unpack(answer))
    return plan


def _all_reads(
    manifest: Manifest,
    files: DataFiles,
    match: Match,
    plan: ReadPlan,
    keep: Callable[[str, Any], None] | None,
) -> Iterator[tuple[int, Read]]:
    """``(file, read)`` for all targets; ``keep`` sees names and memory before it is overwritten."""
    located = locate_items(manifest, match, files.source)
    table = located.table
    starts = np.searchsorted(table.key, np.arange(len(table.keys) + 1))
    numbers = dict(zip(manifest.names, range(len(manifest.names)), strict=True))
    for target in match.tensors:
        if target.mapped is not None:
            yield from mapped_reads(
                located, starts, numbers, target, plan.casts, plan.constants, keep
            )
            continue
        rows = range(int(starts[target.key]), int(starts[target.key + 1]))
        yield from box_reads(located, rows, target, plan.casts, keep)
    for key in {target.key for target in match.values}:
        if key in manifest.inline:
            plan.values[key] = manifest.inline[key]
            continue
        row = int(starts[key])
        read = _value_read(key, manifest.names[key], table, row, plan.values)
        yield int(table.file[row]), read


def _value_read(key: int, name: str, table: Any, row: int, values: dict[int, bytes]) -> Read:
    def deliver(data: memoryview) -> None:
        values[key] = bytes(data)

    offset = int(table.offset[row] + table.payload[row])
    return Read(offset, int(table.length[row] - table.payload[row]), name, deliver=deliver)


def _describe(plan: ReadPlan, manifest: Manifest, needed: int) -> bytes:
    """The blocks that this rank touches, as intervals per file, for ``needed`` bytes of tensors."""
    block = block_bytes(manifest)
    rows = [
        (file, begin, end)
        for file in sorted(plan.reads)
        for begin, end in covering(plan.reads[file], block, manifest.files[file].size)
    ]
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    columns = {"file": table[:, 0], "begin": table[:, 1], "end": table[:, 2]}
    return frame(needed, pack_columns(columns))


def covering(reads: Iterable[Read], block: int, size: int) -> list[Interval]:
    """The whole blocks that ``reads`` touch, as disjoint intervals in order."""
    merged: list[Interval] = []
    spans = sorted((read.offset, read.offset + read.length) for read in reads)
    for low, high in spans:
        begin, end = low // block * block, min(-(-high // block) * block, size)
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _decide(messages: list[bytes], job: LoadJob) -> list[bytes]:
    """On the coordinator: segments that several ranks need, or nothing."""
    mode = job.parts.config.read_replicas
    nothing = [b""] * len(messages)
    if mode == "each" or len(messages) == 1:
        return nothing
    needed, wanted = 0, []
    for rank, message in enumerate(messages):
        count, (packed,) = unframe(message)
        needed += count
        columns = unpack_columns(packed)
        wanted.append((rank, columns["file"], columns["begin"], columns["end"]))
    total = sum(int((end - begin).sum()) for _, _, begin, end in wanted)
    pieces = list(_sweep(wanted))
    unique = sum(end - begin for _, begin, end, _ in pieces)
    is_wasteful = total > _TOLERATED * needed or total >= _AUTO_REPLICAS * unique
    if total == unique or (mode == "auto" and (total < _SMALLEST_SHARED or not is_wasteful)):
        return nothing
    assert job.manifest is not None
    segments = _assign(pieces, len(messages), block_bytes(job.manifest))
    return [_pack(segments, len(messages))] * len(messages)


def _sweep(
    wanted: list[tuple[int, Column, Column, Column]],
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    """``(file, begin, end, ranks)`` of every stretch that the same ranks need."""
    events: dict[int, list[tuple[int, int, int]]] = {}
    for rank, files, begins, ends in wanted:
        columns = zip(files.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for file, begin, end in columns:
            events.setdefault(file, []).extend([(begin, 1, rank), (end, 0, rank)])
    for file in sorted(events):
        active: set[int] = set()
        previous = 0
        for place, starts, rank in sorted(events[file]):
            if active and place > previous:
                yield file, previous, place, tuple(sorted(active))
            previous = place
            (active.add if starts else active.discard)(rank)


def _assign(
    pieces: list[tuple[int, int, int, tuple[int, ...]]], world_size: int, block: int
) -> list[Segment]:
    """Cut what several ranks need into segments, each read by the needer with the least to read."""
    load = [0] * world_size
    for _, begin, end, ranks in pieces:
        if len(ranks) == 1:
            load[ranks[0]] += end - begin
    step = max(block, _SEGMENT_BYTES // block * block)
    segments = []
    for file, begin, end, ranks in pieces:
        if len(ranks) == 1:
            continue
        for start in range(begin, end, step):
            stop = min(start + step, end)
            reader = min(ranks, key=lambda rank: load[rank])
            load[reader] += stop - start
            segments.append(Segment(file, start, stop, reader, ranks))
    return segments


def _pack(segments: list[Segment], world_size: int) -> bytes:
    masks = np.zeros((len(segments), -(-world_size // _MASK_BITS)), np.int64)
    for position, segment in enumerate(segments):
        for rank in segment.needers:
            masks[position, rank // _MASK_BITS] |= 1 << rank % _MASK_BITS
    rows = np.asarray([(s.file, s.begin, s.end, s.reader) for s in segments], np.int64)
    return pack_columns({"rows": rows, "needers": masks})


def _unpack(data: bytes) -> list[Segment]:
    columns = unpack_columns(data)
    needers: dict[tuple[int, ...], tuple[int, ...]] = {}
    segments = []
    rows = zip(columns["rows"].tolist(), columns["needers"].tolist(), strict=True)
    for (file, begin, end, reader), mask in rows:
        ranks = needers.setdefault(tuple(mask), _ranks(mask))
        segments.append(Segment(file, begin, end, reader, ranks))
    return segments


def _ranks(mask: list[int]) -> tuple[int, ...]:
    return tuple(
        word * _MASK_BITS + bit
        for word, bits in enumerate(mask)
        for bit in range(_MASK_BITS)
        if bits >> bit & 1
    )
