"""Reads ranges of a file into memory, verifying every block that it touches.

Large ranges go straight to where they belong: their inner blocks are read into the target and
hashed there. What is left (small ranges, and the ends of large ones) is read block by block
into a kept buffer, neighbours together, and handed on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dcp_pipeline.core.errors import ChecksumError, CorruptCheckpointError
from dcp_pipeline.core.sums import BlockSums
from dcp_pipeline.storage.base import Source

__all__ = ["Read", "read_ranges"]

_DIRECT_BLOCKS = 4
_STEP_BYTES = 8 << 20
_WINDOW_BYTES = 4 << 20
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a file and where it goes.

    Attributes:
        offset, length: the range, bytes.
        key: what it is part of, for errors.
        target: memory of ``length`` bytes to fill; or else
        deliver: called with the bytes, which are valid only during the call.
        before: called before anything is overwritten.
        check: raises where the bytes are not what they should be. It is called with all of them
            once ``target`` has them, and where they are only verified; ``deliver`` checks itself.
        has_checksum: whether ``check`` compares them with a checksum.
        is_early: whether others wait for it, so that it should come before them.
    """

    offset: int
    length: int
    key: str
    target: memoryview | None = None
    deliver: Callable[[memoryview], None] | None = None
    before: Callable[[], None] | None = None
    check: Callable[[memoryview], None] | None = None
    has_checksum: bool = False
    is_early: bool = False


def read_ranges(
    source: Source,
    sums: BlockSums | None,
    reads: Sequence[Read],
    check: Callable[[], None] = lambda: None,
) -> int:
    """Do all ``reads`` of one file; the bytes that were read from storage.

    Args:
        sums: digests of the file's blocks, ``None`` to read without verifying.
        check: called between two steps; may raise to stop.

    Raises:
        ChecksumError: a block is not what was written.
        CorruptCheckpointError: the file has not the size that it had.
    """
    if sums is not None and sums.size != source.size:
        raise CorruptCheckpointError(
            f"{source.name} has {source.size} bytes, {sums.size} were written: it was"
            f" {'cut off' if source.size < sums.size else 'appended to'}"
        )
    block_bytes = sums.block_bytes if sums is not None else 4096
    reader = _Reader(source, sums, block_bytes, check)
    small: list[Read] = []
    for read in sorted(reads, key=lambda read: read.offset):
        if read.before is not None:
            read.before()
        small.extend(reader.read_direct(read))
    for window in _windows(small, block_bytes):
        reader.read_window(window)
    for read in reads:
        if read.target is not None and read.check is not None:
            read.check(read.target)
    return reader.nbytes


class _Reader:
    def __init__(
        self, source: Source, sums: BlockSums | None, block_bytes: int, check: Callable[[], None]
    ) -> None:
        self._source = source
        self._sums = sums
        self._block_bytes = block_bytes
        self._check = check
        self._buffer = bytearray()
        self.nbytes = 0

    def read_direct(self, read: Read) -> Iterator[Read]:
        """Read the inner blocks of a large range; what remains of it."""
        block = self._block_bytes
        begin = -(-read.offset // block) * block
        end = (read.offset + read.length) // block * block
        if read.target is None or end - begin < _DIRECT_BLOCKS * block:
            yield read
            return
        step = max(block, _STEP_BYTES // block * block)
        for start in range(begin, end, step):
            self._check()
            target = read.target[start - read.offset : min(start + step, end) - read.offset]
            self._source.read_into(start, target)
            self.nbytes += len(target)
            self._verify(start, target, [read])
        if read.offset < begin:
            yield _part(read, read.offset, begin)
        if end < read.offset + read.length:
            yield _part(read, end, read.offset + read.length)

    def read_window(self, reads: list[Read]) -> None:
        """Read the blocks that cover ``reads`` and hand the bytes on."""
        self._check()
        block = self._block_bytes
        begin = reads[0].offset // block * block
        last = max(read.offset + read.length for read in reads)
        end = min(-(-last // block) * block, self._source.size)
        if last > end:
            raise CorruptCheckpointError(
                f"{self._source.name} has {self._source.size} bytes, {reads[-1].key} needs {last}"
            )
        if len(self._buffer) < end - begin:
            self._buffer = bytearray(end - begin)
        view = memoryview(self._buffer)[: end - begin]
        self._source.read_into(begin, view)
        self.nbytes += len(view)
        self._verify(begin, view, reads)
        for read in reads:
            piece = view[read.offset - begin : read.offset - begin + read.length]
            if read.target is not None:
                read.target[:] = piece
            elif read.deliver is not None:
                read.deliver(piece)

    def _verify(self, offset: int, data: memoryview, reads: Sequence[Read]) -> None:
        if self._sums is None:
            return
        bad = self._sums.first_difference(data, offset // self._block_bytes)
        if bad is None:
            return
        start = bad * self._block_bytes
        hit = [
            read.key
            for read in reads
            if read.offset < start + self._block_bytes and start < read.offset + read.length
        ]
        keys = sorted(set(hit or [read.key for read in reads]))
        raise ChecksumError(
            f"{self._source.name} is damaged: block {bad} (bytes {start} to"
            f" {min(start + self._block_bytes, self._source.size)}) does not match its"
            f" {self._sums.algorithm} digest; it holds {', '.join(keys[:5])}"
        )


def _part(read: Read, begin: int, end: int) -> Read:
    assert read.target is not None
    target = read.target[begin - read.offset : end - read.offset]
    return Read(begin, end - begin, read.key, target)


def _windows(reads: list[Read], block_bytes: int) -> Iterator[list[Read]]:
    """Runs of neighbouring reads, each run about as long as a window."""
    window: list[Read] = []
    end = 0
    for read in sorted(reads, key=lambda read: read.offset):
        covered = -(-end // block_bytes) * block_bytes
        near = read.offset <= covered + _GAP_BYTES
        fits = read.offset + read.length - window[0].offset <= _WINDOW_BYTES if window else True
        if window and not (near and fits):
            yield window
            window, end = [], 0
        window.append(read)
        end = max(end, read.offset + read.length)
    if window:
        yield window
