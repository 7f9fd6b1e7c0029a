"""Blocks that several ranks need: read by one of them, verified there, and passed on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import CorruptCheckpointError, PeerFailedError
from dcp_pipeline.pipelines.steps.data_files import DataFiles
from dcp_pipeline.pipelines.steps.load_share import Interval, Segment, covering
from dcp_pipeline.storage.reading import Read

__all__ = ["Assembler", "SharedReads", "split_reads"]

_ROUND_BYTES = 16 << 20
_STEP_BYTES = 4 << 20


def split_reads(
    reads: dict[int, list[Read]], segments: list[Segment], rank: int
) -> tuple[dict[int, list[Read]], dict[int, list[Read]]]:
    """This rank's reads apart from those that touch a segment, and those that do."""
    mine: dict[int, list[Interval]] = {}
    for segment in segments:
        if rank in segment.needers:
            mine.setdefault(segment.file, []).append((segment.begin, segment.end))
    apart: dict[int, list[Read]] = {}
    touching: dict[int, list[Read]] = {}
    for file, parts in reads.items():
        spans = np.asarray(sorted(mine.get(file, ())), np.int64).reshape(-1, 2)
        for read in parts:
            end = read.offset + read.length
            meets = bool(((spans[:, 0] < end) & (spans[:, 1] > read.offset)).any())
            (touching if meets else apart).setdefault(file, []).append(read)
    return apart, touching


class Assembler:
    """Puts the reads of one file together from stretches that come in any order, each once."""

    def __init__(self, reads: list[Read]) -> None:
        self._reads = reads
        self._starts = np.asarray([read.offset for read in reads], np.int64)
        self._ends = self._starts + np.asarray([read.length for read in reads], np.int64)
        self._filled = [0] * len(reads)
        self._buffers: dict[int, bytearray] = {}
        self._lock = threading.Lock()

    def feed(self, offset: int, data: memoryview) -> None:
        """Take the bytes of the file from ``offset`` on. Called from several threads."""
        with self._lock:
            self._feed(offset, data)

    def _feed(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        for position in np.flatnonzero((self._starts < end) & (self._ends > offset)).tolist():
            read = self._reads[position]
            if not self._filled[position] and read.before is not None:
                read.before()
            low, high = max(read.offset, offset), min(read.offset + read.length, end)
            target = read.target
            if target is None:
                target = memoryview(self._buffers.setdefault(position, bytearray(read.length)))
            target[low - read.offset : high - read.offset] = data[low - offset : high - offset]
            self._filled[position] += high - low
            if self._filled[position] < read.length:
                continue
            if read.deliver is not None:
                read.deliver(memoryview(self._buffers.pop(position)))
            elif read.check is not None:
                read.check(target)

    def named(self, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
        """A stretch cut where reads begin and end, each part with the key that it is of."""
        edges = np.concatenate([self._starts, self._ends])
        cuts = [begin, *np.unique(edges[(edges > begin) & (edges < end)]).tolist(), end]
        for low, high in pairwise(cuts):
            over = np.flatnonzero((self._starts < high) & (self._ends > low))
            yield low, high, self._reads[int(over[0])].key if len(over) else "no key"

    def check(self) -> None:
        """Raise unless every read got all of its bytes."""
        for read, filled in zip(self._reads, self._filled, strict=True):
            if filled != read.length:
                raise CorruptCheckpointError(f"{read.key}: {filled} of {read.length} bytes came")


class SharedReads:
    """The reads of one rank that touch shared segments.

    Args:
        reads: those that touch a segment, by file.
        segments: the same list on every rank.
        block: bytes that are read at a time at least.
        sizes: of the files.
    """

    def __init__(
        self,
        reads: dict[int, list[Read]],
        segments: list[Segment],
        coordinator: Coordinator,
        block: int,
        sizes: list[int],
    ) -> None:
        self._segments = segments
        self._coordinator = coordinator
        self._assemblers = {file: Assembler(parts) for file, parts in reads.items()}
        self._rest = {
            file: list(self._not_shared(file, covering(parts, block, sizes[file])))
            for file, parts in reads.items()
        }

    def _not_shared(self, file: int, needed: list[Interval]) -> Iterator[Interval]:
        rank = self._coordinator.rank
        taken = sorted(
            (s.begin, s.end) for s in self._segments if s.file == file and rank in s.needers
        )
        for begin, end in needed:
            at = begin
            for low, high in taken:
                if low >= end or high <= at:
                    continue
                if at < low:
                    yield at, low
                at = high
            if at < end:
                yield at, end

    def own(self) -> dict[int, list[Read]]:
        """Everything that this rank itself has to read, to be verified and thrown away."""
        reads: dict[int, list[Read]] = {}
        for file, spans in self._rest.items():
            for begin, end in spans:
                reads.setdefault(file, []).extend(self._named(file, begin, end))
        for segment in self._segments:
            if segment.reader == self._coordinator.rank:
                parts = self._named(segment.file, segment.begin, segment.end)
                reads.setdefault(segment.file, []).extend(parts)
        return reads

    def _named(self, file: int, begin: int, end: int) -> Iterator[Read]:
        for low, high, key in self._assemblers[file].named(begin, end):
            yield Read(low, high - low, key)

    def run(self, files: DataFiles) -> int:
        """Read, pass on and assemble; bytes read from storage.

        A rank whose reading fails goes on passing bytes on, marked as bad, so that nobody waits for
        it; its error is raised at the end, and the load is undone on all ranks.
        """
        nbytes, failure = 0, None
        for group in _rounds(self._segments):
            buffers = self._buffers(group)
            try:
                nbytes += files.run(self._reads_of(group, buffers))
                self._mark_as_read(group, buffers)
            except Exception as error:
                failure = failure or error
            self._pass_on(group, buffers)
            failure = failure or self._failure_of_reader(group, buffers)
            if failure is None:
                for position, buffer in buffers.items():
                    segment = group[position]
                    data = memoryview(buffer)[: segment.end - segment.begin]
                    self._assemblers[segment.file].feed(segment.begin, data)
        if failure is not None:
            raise failure
        nbytes += files.run(self._rest_reads())
        for assembler in self._assemblers.values():
            assembler.check()
        return nbytes

    def _mark_as_read(self, group: list[Segment], buffers: dict[int, bytearray]) -> None:
        for position, buffer in buffers.items():
            if group[position].reader == self._coordinator.rank:
                buffer[-1] = 1

    def _failure_of_reader(
        self, group: list[Segment], buffers: dict[int, bytearray]
    ) -> PeerFailedError | None:
        bad = [group[position].reader for position, buffer in buffers.items() if not buffer[-1]]
        return PeerFailedError(f"rank {bad[0]} could not read what it passes on") if bad else None

    def _buffers(self, group: list[Segment]) -> dict[int, bytearray]:
        """What this rank needs of each segment, and a byte that says whether it was read."""
        rank = self._coordinator.rank
        return {
            position: bytearray(segment.end - segment.begin + 1)
            for position, segment in enumerate(group)
            if rank in segment.needers
        }

    def _reads_of(
        self, group: list[Segment], buffers: dict[int, bytearray]
    ) -> dict[int, list[Read]]:
        reads: dict[int, list[Read]] = {}
        for position, segment in enumerate(group):
            if segment.reader == self._coordinator.rank:
                view = memoryview(buffers[position])
                for part in self._named(segment.file, segment.begin, segment.end):
                    start = part.offset - segment.begin
                    target = view[start : start + part.length]
                    reads.setdefault(segment.file, []).append(replace(part, target=target))
        return reads

    def _pass_on(self, group: list[Segment], buffers: dict[int, bytearray]) -> None:
        rank = self._coordinator.rank
        sends, receives = [], []
        for position, segment in enumerate(group):
            if segment.reader == rank:
                view = memoryview(buffers[position])
                sends += [(other, view) for other in segment.needers if other != rank]
            elif rank in segment.needers:
                receives.append((segment.reader, memoryview(buffers[position])))
        self._coordinator.pass_on(sends, receives)

    def _rest_reads(self) -> dict[int, list[Read]]:
        """What only this rank needs of the reads that are put together."""
        reads: dict[int, list[Read]] = {}
        for file, spans in self._rest.items():
            assembler = self._assemblers[file]
            for begin, end in spans:
                for start in range(begin, end, _STEP_BYTES):
                    stop = min(start + _STEP_BYTES, end)
                    for low, high, key in assembler.named(start, stop):
                        part = Read(low, high - low, key, deliver=partial(assembler.feed, low))
                        reads.setdefault(file, []).append(part)
        return reads


def _rounds(segments: list[Segment]) -> Iterator[list[Segment]]:
    """Segments that are passed on together; a round is bounded in bytes over all ranks."""
    group: list[Segment] = []
    nbytes = 0
    for segment in segments:
        group.append(segment)
        nbytes += segment.end - segment.begin
        if nbytes >= _ROUND_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
