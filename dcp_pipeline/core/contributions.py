"""What the chunks of a file contribute to the fingerprints of their tensors, taken as bytes go by.

A contribution is the raw CRC of a chunk, shifted by the bytes that follow it in the whole tensor:
the XOR of all contributions is the raw CRC of the tensor, whoever wrote which chunk, in any order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from dcp_pipeline.core.crc64 import Words, finished, shift
from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.runs import Box, crcs_of
from dcp_pipeline.core.table import ChunkTable

__all__ = ["Contributions", "fingerprints_of"]


class Contributions:
    """Takes the contributions of chunks from bytes in which they lie one after another.

    Args:
        starts: where the elements of each chunk start, ascending.
        lengths: their bytes; 0 for a value, which has none.
        box_of: the box that a chunk is; asked for chunks that have bytes.

    Example:
        A tensor of shape 2 x 2, int8, cut into its columns:

        >>> from dcp_pipeline.core.crc64 import raw_crc64
        >>> whole, columns = bytes([1, 2, 3, 4]), [bytes([1, 3]), bytes([2, 4])]
        >>> taken = Contributions([0, 2], [2, 2], lambda chunk: Box((2, 2), (0, chunk), (2, 1), 1))
        >>> taken.add(0, memoryview(b"".join(columns)))
        >>> parts, nbytes = taken.result()
        >>> finished(int(parts[0] ^ parts[1]), 4) == finished(raw_crc64(whole), 4)
        True
    """

    def __init__(
        self, starts: Sequence[int], lengths: Sequence[int], box_of: Callable[[int], Box]
    ) -> None:
        self._starts = starts
        self._ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._box_of = box_of
        self._chunks: list[int] = []
        self._found: list[tuple[int, int]] = []
        self._nbytes = [0] * len(starts)

    def add(self, position: int, data: memoryview) -> None:
        """Take the bytes from ``position`` on; any bytes may come at any time, but each once."""
        end = position + len(data)
        first = bisect_right(self._ends, position)
        for chunk in range(first, bisect_left(self._starts, end, first)):
            start = self._starts[chunk]
            low, high = max(start, position), min(self._ends[chunk], end)
            if low < high:
                self._take(chunk, low - start, data[low - position : high - position])

    def _take(self, chunk: int, begin: int, data: memoryview) -> None:
        self._nbytes[chunk] += len(data)
        found = crcs_of(self._box_of(chunk), begin, data)
        self._chunks += [chunk] * len(found)
        self._found += found

    def result(self) -> tuple[Words, Column]:
        """The contributions of all chunks so far, and how many bytes of each were seen."""
        contributions = np.zeros(len(self._starts), np.uint64)
        if self._chunks:
            raws, trailing = zip(*self._found, strict=True)
            moved = shift(np.asarray(raws, np.uint64), np.asarray(trailing, np.int64))
            np.bitwise_xor.at(contributions, self._chunks, moved)
        return contributions, np.asarray(self._nbytes, np.int64)


def fingerprints_of(table: ChunkTable, parts: Words) -> list[int]:
    """The fingerprint of every key of a table whose chunks tile their tensors.

    Args:
        parts: ``[n]`` contributions of the chunks of tensors, and the digests of values.
    """
    combined = np.zeros(len(table.keys), np.uint64)
    np.bitwise_xor.at(combined, table.key, parts)
    numbers = combined.tolist()
    sizes: dict[int, int] = {}
    for key, spec in enumerate(table.keys):
        if spec.dtype is not None and spec.alias < 0:
            nbytes = spec.item_size
            for extent in spec.shape:
                nbytes *= extent
            # Tensors of a model have few sizes.
            if nbytes not in sizes:
                sizes[nbytes] = finished(0, nbytes)
            numbers[key] ^= sizes[nbytes]
    return [numbers[key if spec.alias < 0 else spec.alias] for key, spec in enumerate(table.keys)]
