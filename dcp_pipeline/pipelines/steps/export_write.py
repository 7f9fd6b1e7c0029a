"""Node ``write`` of an export: this rank's boxes, into files that all ranks write together."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from math import prod

import numpy as np

from dcp_pipeline.core.contributions import Contributions
from dcp_pipeline.core.crc64 import Words
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import PeerFailedError
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.resumption import batches, words_as_text, words_of_text
from dcp_pipeline.pipelines.steps.save_write import box_of, items_of, split_evenly, step_views
from dcp_pipeline.pipelines.values import Places, Receipt, Share
from dcp_pipeline.storage.base import RangeWriter
from dcp_pipeline.types.entries import Entries, Item
from dcp_pipeline.types.memory import segments_of

__all__ = ["runs_of", "write_placed", "write_ranges"]

_STEP_BYTES = 8 << 20


def write_ranges(staged: Entries, share: Share, job: SaveJob) -> Receipt:
    """Write this rank's share where it was planned to lie; all durable when this returns."""
    assert share.places is not None
    return write_placed(list(items_of(staged, share)), share.places, job)


def write_placed(items: list[Item], places: Places, job: SaveJob) -> Receipt:
    """Write items where they were planned to lie; all durable when this returns."""
    started = time.perf_counter()
    words = np.zeros(len(items), np.uint64)
    nothing = np.zeros(len(items), np.int64)
    resumption, whole = job.resumable(), [slice(0, len(items))]
    if resumption is not None:
        whole = batches([_nbytes(item) for item in items], 1)
    for batch in whole:
        unit = f"{batch.start}-{batch.stop}"
        found = resumption.found(unit) if resumption is not None else None
        if found is not None and all(job.directory.token(n) is not None for n in found[0]):
            words[batch] = words_of_text(found[1])
            job.written += found[0]
        elif batch.stop:
            names = _write_batch(items[batch], places, batch, words, job)
            if resumption is not None:
                resumption.note(unit, [names, words_as_text(words[batch])])
    if items:
        job.directory.sync()
    nbytes = sum(_nbytes(item) for item in items)
    return Receipt(
        (),
        None,
        nothing,
        nothing,
        nothing,
        nothing,
        nbytes,
        seconds=time.perf_counter() - started,
        fingerprint=words if job.parts.config.fingerprint else None,
    )


def _write_batch(
    items: list[Item], places: Places, batch: slice, words: Words, job: SaveJob
) -> list[str]:
    """Write some items, durably; the names of the files that they lie in."""
    numbers, starts = places.file[batch].tolist(), places.start[batch].tolist()
    with ExitStack() as stack:
        writers = {
            number: stack.enter_context(_opened(job, *places.files[number]))
            for number in sorted(set(numbers))
        }
        rows = zip(items, numbers, starts, strict=True)
        work = [(item, writers[number], start) for item, number, start in rows]
        words[batch] = _write_all(work, job)
    return [places.files[number][0] for number in writers]


def _opened(job: SaveJob, name: str, size: int) -> RangeWriter:
    # Noted first: a file that was only begun has to be removed as well.
    job.written.append(name)
    return job.directory.open_ranges(name, size)


def _nbytes(item: Item) -> int:
    assert item.dtype is not None
    return prod(item.sizes) * ITEM_SIZES[item.dtype]


Work = tuple[Item, RangeWriter, int]


def _write_all(work: list[Work], job: SaveJob) -> Words:
    """Several threads, each with about as many bytes; what the items add to fingerprints."""
    stop = threading.Event()
    words = np.zeros(len(work), np.uint64)
    parts = split_evenly([_nbytes(item) for item, _, _ in work], job.parts.storage.thread_count)

    def run(part: slice) -> None:
        try:
            for number in range(*part.indices(len(work))):
                words[number] = _write(*work[number], job, stop)
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(parts), "dcp_pipeline write") as pool:
        try:
            futures = [pool.submit(run, part) for part in parts]
            wait(futures)
        except BaseException:
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, PeerFailedError)]
    if errors:
        raise (causes or errors)[0]
    return words


def _write(
    item: Item, writer: RangeWriter, start: int, job: SaveJob, stop: threading.Event
) -> np.uint64:
    """Write one box; what it adds to the fingerprint of its key, 0 where that is not taken."""
    assert item.dtype is not None and not isinstance(item.data, bytes)
    taken = Contributions([0], [_nbytes(item)], lambda _: box_of(item))
    has_fingerprint = job.parts.config.fingerprint
    run_bytes, places = runs_of(item.shape, item.offsets, item.sizes, ITEM_SIZES[item.dtype])
    position, place, left = 0, 0, 0
    for segment in segments_of(item.data):
        for data in _steps(segment):
            if stop.is_set():
                raise PeerFailedError("another thread of this rank has failed")
            job.check_peers()
            if has_fingerprint:
                for part in step_views(data):
                    taken.add(position, part)
                    position += len(part)
            while len(data):
                if not left:
                    place, left = start + next(places), run_bytes
                count = min(left, len(data))
                writer.write(place, data[:count])
                data, place, left = data[count:], place + count, left - count
    return np.uint64(taken.result()[0][0])


def _steps(segment: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(segment), _STEP_BYTES):
        yield segment[begin : begin + _STEP_BYTES]


def runs_of(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int
) -> tuple[int, Iterator[int]]:
    """The runs of bytes that a box is within its tensor, row-major: length, and where each starts.

    >>> length, places = runs_of([4, 6], [1, 2], [2, 3], 4)
    >>> length, list(places)
    (12, [32, 56])
    """
    # Inner axes that are whole belong to one run with the axis before them.
    inner, run = len(shape), itemsize
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
        run *= shape[inner]
    if inner:
        inner -= 1
        run *= sizes[inner]
    strides = [itemsize * prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return run, _places(first, sizes[:inner], strides[:inner])


def _places(first: int, sizes: Sequence[int], strides: Sequence[int]) -> Iterator[int]:
    if not sizes:
        yield first
        return
    for index in range(sizes[0]):
        yield from _places(first + index * strides[0], sizes[1:], strides[1:])
