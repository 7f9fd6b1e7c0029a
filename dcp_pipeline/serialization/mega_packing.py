"""The elements of a tensor as the spans of a MEGA file: cut, shuffled, compressed, checksummed.

Where each span lies, and its checksum, stand in front of all of them. So every tensor is gone
through twice: once for the sizes and checksums, and once to be written. What was compressed is kept
in between as far as it fits into a budget, and compressed again beyond that, to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dcp_pipeline.core.spans import Span
from dcp_pipeline.formats.spans import checksum_of, compress, shuffled

__all__ = ["Kept", "Packing"]

_KEPT_BYTES = 256 << 20


@dataclass
class Kept:
    """Compressed spans of one file, by their offset, until they are written.

    Attributes:
        limit: bytes of all of them, at most.
    """

    limit: int
    spans: dict[int, bytes] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, offset: int, packed: bytes) -> None:
        """Keep a span, if there is room for it."""
        if self.nbytes + len(packed) <= self.limit:
            self.spans[offset] = packed
            self.nbytes += len(packed)


@dataclass(frozen=True)
class Packing:
    """How tensors are stored.

    Attributes:
        checksum: of the stored bytes, ``crc32``, ``sha256`` or empty.
        chunk_bytes: of elements, at most, in a span.
        level: of zstd; ``None`` to store elements as they are.
        shuffle: whether bytes are grouped by their place in their element before that.
        kept_bytes: of compressed spans, at most, that wait in memory while a file is written.
    """

    checksum: str
    chunk_bytes: int
    level: int | None
    shuffle: bool
    kept_bytes: int = _KEPT_BYTES

    def spans(
        self, views: Iterable[memoryview], nbytes: int, width: int, offset: int, kept: Kept
    ) -> list[Span]:
        """How a tensor is stored from ``offset`` of the payload on.

        Args:
            views: its elements, row-major.
            nbytes: of all of them.
            width: bytes of one element.
        """
        if not nbytes or (self.level is None and not self.checksum):
            digest = checksum_of(self.checksum, b"")
            return [Span(offset, nbytes, 0, nbytes, "raw", 0, self.checksum, digest)]
        found, begin = [], 0
        for chunk in self._chunks(views, nbytes):
            packed = self._packed(chunk, width)
            stored = chunk if packed is None else packed
            codec, shuffle = ("raw", 0) if packed is None else ("zstd", self._shuffle(width))
            digest = checksum_of(self.checksum, stored)
            size = len(chunk)
            span = Span(offset, len(stored), begin, size, codec, shuffle, self.checksum, digest)
            found.append(span)
            if packed is not None:
                kept.add(offset, packed)
            begin, offset = begin + size, offset + len(stored)
        return found

    def stored(
        self, views: Iterable[memoryview], width: int, spans: list[Span], kept: Kept
    ) -> Iterator[memoryview]:
        """The bytes of the spans; each view is valid until the next is asked for."""
        if all(span.codec == "raw" for span in spans):
            yield from views
            return
        for span, chunk in zip(spans, self._chunks(views, spans[-1].end), strict=True):
            if span.codec == "raw":
                yield chunk
                continue
            packed = kept.spans.get(span.offset) or self._packed(chunk, width)
            assert packed is not None and len(packed) == span.stored
            yield memoryview(packed)

    def _shuffle(self, width: int) -> int:
        return width if self.shuffle and width > 1 else 0

    def _packed(self, chunk: memoryview, width: int) -> bytes | None:
        """A chunk compressed; ``None`` where that does not make it smaller."""
        if self.level is None:
            return None
        packed = compress(shuffled(chunk, width) if self._shuffle(width) else chunk, self.level)
        return packed if len(packed) < len(chunk) else None

    def _chunks(self, views: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
        """The elements cut into chunks, without a copy where one lies within a view."""
        pending, done = bytearray(), 0
        for view in views:
            position = 0
            while position < len(view):
                size = min(self.chunk_bytes, nbytes - done)
                part = view[position : position + size - len(pending)]
                position += len(part)
                if not pending and len(part) == size:
                    yield part
                    done += size
                    continue
                pending += part
                if len(pending) == size:
                    yield memoryview(pending)
                    pending, done = bytearray(), done + size
