"""Node ``write``: stream this rank's share to storage, hashing every block on the way.

The same bytes give what the chunks add to the fingerprints of their keys, while they are at hand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dcp_pipeline.core.checksum import block_digests
from dcp_pipeline.core.contributions import Contributions
from dcp_pipeline.core.crc64 import Words
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import PeerFailedError
from dcp_pipeline.core.manifest import FileEntry, SumsEntry
from dcp_pipeline.core.runs import Box
from dcp_pipeline.core.spans import Span
from dcp_pipeline.core.sums import BlockSums, encode_sums, sums_digest
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.resumption import batches, words_as_text, words_of_text
from dcp_pipeline.pipelines.values import Receipt, Share
from dcp_pipeline.serialization.base import FileImage
from dcp_pipeline.types.entries import Entries, Item, Piece
from dcp_pipeline.types.memory import segments_of

__all__ = ["box_of", "items_of", "split_evenly", "step_views", "write", "write_items"]

_SMALLEST_FILE = 4 << 20
_STEP_BYTES = 1 << 20


def write(staged: Entries, share: Share, job: SaveJob) -> Receipt:
    """Write this rank's data files and their digests; all durable when this returns."""
    return write_items(list(items_of(staged, share)), job, job.parts.config.fingerprint)


def write_items(
    items: list[Item],
    job: SaveJob,
    has_fingerprint: bool = False,
    parts: list[slice] | None = None,
) -> Receipt:
    """Write items to this rank's data files, and the files' digests.

    Args:
        parts: the items of each file; ``None`` for files of about one size.
    """
    if not items:
        nothing = np.zeros(0, np.int64)
        words = np.zeros(0, np.uint64) if has_fingerprint else None
        return Receipt((), None, nothing, nothing, nothing, nothing, 0, fingerprint=words)
    started = time.perf_counter()
    sizes = [_nbytes(item) for item in items]
    if parts is None:
        cut = split_evenly if job.resumable() is None else batches
        parts = cut(sizes, job.parts.storage.thread_count)
    files = _write_files(job, [items[part] for part in parts], has_fingerprint)
    entries = tuple(FileEntry(file.sums.name, file.image.size) for file in files)
    sums = _write_sums(job, [file.sums for file in files]) if job.parts.layout.checksum else None
    job.directory.sync()
    images = [file.image for file in files]
    counts = [len(image.offset) for image in images]
    return Receipt(
        files=entries,
        sums=sums,
        file=np.repeat(np.arange(len(files), dtype=np.int64), counts),
        offset=np.concatenate([image.offset for image in images]),
        length=np.concatenate([image.length for image in images]),
        payload=np.concatenate([image.payload for image in images]),
        nbytes=sum(image.size for image in images),
        seconds=time.perf_counter() - started,
        fingerprint=np.concatenate([file.words for file in files]) if has_fingerprint else None,
        encoded=_encoded(images),
    )


def _encoded(images: list[FileImage]) -> dict[int, tuple[Span, ...]]:
    """The encoded items of several files, by their number among all items."""
    found: dict[int, tuple[Span, ...]] = {}
    first = 0
    for image in images:
        found |= {first + row: spans for row, spans in image.encoded.items()}
        first += len(image.offset)
    return found


def split_evenly(nbytes: Sequence[int], parts: int) -> list[slice]:
    """Cut a sequence of items into at most ``parts`` runs of about as many bytes.

    >>> split_evenly([8 << 20, 8 << 20, 16 << 20], 2)
    [slice(0, 2, None), slice(2, 3, None)]
    """
    ends = np.cumsum(nbytes)
    total = int(ends[-1])
    parts = max(1, min(parts, total // _SMALLEST_FILE))
    middles = ends - np.asarray(nbytes) / 2
    part = np.minimum(middles * parts // max(total, 1), parts - 1).astype(int)
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(ends)]
    return [slice(begin, end) for begin, end in pairwise(cuts)]


def _nbytes(item: Item) -> int:
    data = item.data
    return len(data) if isinstance(data, bytes) else data.numel() * data.element_size()


def items_of(staged: Entries, share: Share) -> Iterator[Item]:
    """The chunks of the share, each over the local memory that it is a part of."""
    sources: list[tuple[int, Piece | None]] = []
    for position, entry in enumerate(staged):
        if entry.dtype is None:
            sources.append((position, None))
        sources.extend((position, piece) for piece in entry.pieces)
    rows, offsets, sizes = share.row.tolist(), share.offsets.tolist(), share.sizes.tolist()
    for row, offset, size in zip(rows, offsets, sizes, strict=True):
        position, piece = sources[row]
        entry, name = staged[position], share.names[position]
        if piece is None:
            yield Item(name, (), (), (), None, entry.payload, entry.digest)
            continue
        width = len(entry.shape)
        begin, extent = tuple(offset[:width]), tuple(size[:width])
        data = piece.data
        for dimension in range(width):
            if extent[dimension] != piece.sizes[dimension]:
                start = begin[dimension] - piece.offsets[dimension]
                data = data.narrow(dimension, start, extent[dimension])
        yield Item(name, begin, extent, entry.shape, entry.dtype, data)


@dataclass(frozen=True)
class _Written:
    image: FileImage
    sums: BlockSums
    words: Words


def _write_files(job: SaveJob, parts: list[list[Item]], has_fingerprint: bool) -> list[_Written]:
    """One thread a file. The first error stops the others, and is the one that is raised."""
    stop = threading.Event()

    def write_one(number: int) -> _Written:
        try:
            return _write_file(job, number, parts[number], stop, has_fingerprint)
        except BaseException:
            stop.set()
            raise

    try:
        return _all_of(write_one, len(parts), job.parts.storage.thread_count, stop)
    except BaseException:
        # Whoever keeps the error keeps the functions that it came through, but no memory of these.
        for part in parts:
            part.clear()
        raise


def _all_of(
    write_one: Callable[[int], _Written], count: int, thread_count: int, stop: threading.Event
) -> list[_Written]:
    if count == 1:
        return [write_one(0)]
    threads = min(count, thread_count)
    with ThreadPoolExecutor(threads, "dcp_pipeline write") as pool:
        try:
            futures = [pool.submit(write_one, number) for number in range(count)]
            wait(futures)
        except BaseException:
            # Nothing may be written any more once this rank begins to remove what it wrote.
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    # A thread that only stopped because another had failed knows nothing of the cause.
    causes = [error for error in errors if not isinstance(error, PeerFailedError)]
    if errors:
        raise (causes or errors)[0]
    return [future.result() for future in futures]


def _write_file(
    job: SaveJob, number: int, items: list[Item], stop: threading.Event, has_fingerprint: bool
) -> _Written:
    layout, serialization = job.parts.layout, job.parts.serialization
    rank = job.coordinator.rank
    name = layout.data_name(rank, number, job.save_id, serialization.extension)
    image = serialization.image(items)
    found = _found(job, name, image)
    if found is not None:
        return found
    digests: list[bytes] = []
    taken = _contributions(items, image) if has_fingerprint else None
    position = 0
    block_bytes = layout.block_bytes or 1

    def observe(data: memoryview) -> None:
        if stop.is_set():
            raise PeerFailedError("another thread of this rank has failed")
        job.check_peers()
        nonlocal position
        # In small steps: the bytes are still in the cache when they are hashed again.
        for part in step_views(data, block_bytes):
            if layout.checksum:
                digests.append(block_digests(layout.checksum, part, layout.block_bytes))
            if taken is not None:
                taken.add(position, part)
            position += len(part)

    _create(job, name, lambda: job.directory.write(
        name, image.size, image.segments(), observe, block_bytes
    ))  # fmt: skip
    sums = BlockSums(name, image.size, layout.checksum, layout.block_bytes, b"".join(digests))
    written = _Written(image, sums, _words(items, image, taken))
    if job.resumption is not None:
        fact = [image.size, sums.digests.hex(), words_as_text(written.words)]
        job.resumption.note(name, fact)
    return written


def _found(job: SaveJob, name: str, image: FileImage) -> _Written | None:
    """A data file that was finished before a conversion was broken off; else room for it."""
    if job.resumption is None:
        return None
    layout, fact = job.parts.layout, job.resumption.found(name)
    if fact is not None and fact[0] == image.size and job.directory.token(name) is not None:
        job.written.append(name)
        digests = bytes.fromhex(fact[1])
        sums = BlockSums(name, image.size, layout.checksum, layout.block_bytes, digests)
        return _Written(image, sums, words_of_text(fact[2]))
    job.directory.delete([name])
    return None


def step_views(data: memoryview, multiple: int = 1) -> Iterator[memoryview]:
    """``data`` in steps of 1 MiB, or as near to that as whole blocks of ``multiple`` come."""
    step = max(1, _STEP_BYTES // multiple) * multiple
    for begin in range(0, len(data), step):
        yield data[begin : begin + step]


def _contributions(items: list[Item], image: FileImage) -> Contributions:
    tensors = _plain(items, image)
    starts = (image.offset + image.payload)[tensors].tolist()
    lengths = [_nbytes(items[row]) for row in tensors]
    return Contributions(starts, lengths, lambda number: box_of(items[tensors[number]]))


def _plain(items: list[Item], image: FileImage) -> list[int]:
    """The tensors whose elements are in the file as they are."""
    rows = range(len(items))
    return [row for row in rows if items[row].dtype is not None and row not in image.encoded]


def _word_of(item: Item) -> np.uint64:
    """What an item adds to the fingerprint of its key, where no file has its elements."""
    assert not isinstance(item.data, bytes)
    taken, position = Contributions([0], [_nbytes(item)], lambda _: box_of(item)), 0
    for view in segments_of(item.data):
        for part in step_views(view):
            taken.add(position, part)
            position += len(part)
    return np.uint64(taken.result()[0][0])


def box_of(item: Item) -> Box:
    """The box that an item of a tensor is."""
    assert item.dtype is not None
    return Box(item.shape, item.offsets, item.sizes, ITEM_SIZES[item.dtype])


def _words(items: list[Item], image: FileImage, taken: Contributions | None) -> Words:
    """Per item what it adds to the fingerprint of its key, nothing where that was not taken."""
    if taken is None:
        return np.zeros(0, np.uint64)
    words = np.asarray([item.digest for item in items], np.int64).view(np.uint64)
    words[_plain(items, image)] = taken.result()[0]
    for row in image.encoded:
        words[row] = _word_of(items[row])
    return words


def _write_sums(job: SaveJob, sums: list[BlockSums]) -> SumsEntry:
    layout = job.parts.layout
    name = layout.sums_name(job.coordinator.rank, job.save_id)
    data = encode_sums(sums, layout.checksum, layout.block_bytes)
    if job.resumption is not None:
        job.directory.delete([name])
    _create(job, name, lambda: job.directory.put(name, data))
    return SumsEntry(name, len(data), sums_digest(layout.checksum, data))


def _create(job: SaveJob, name: str, action: Callable[[], None]) -> None:
    # Noted first: a file that was only begun has to be removed as well.
    job.written.append(name)
    action()
