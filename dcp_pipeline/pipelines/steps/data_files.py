"""The data files of a checkpoint, read by several threads and verified against their digests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from dcp_pipeline.core.errors import ChecksumError, CorruptCheckpointError, PeerFailedError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.sums import BlockSums, parse_sums, sums_digest
from dcp_pipeline.layout.names import sums_name
from dcp_pipeline.storage.base import Directory, Source
from dcp_pipeline.storage.reading import Read, read_ranges

__all__ = ["DataFiles"]

_TASK_BYTES = 32 << 20
_MOST_OPEN = 128


class DataFiles:
    """The data files of a checkpoint and their digests, opened as they are needed.

    Args:
        threads: that read at a time.
        check: called between two steps; may raise to stop.

    Attributes:
        is_verified: whether everything read so far was checked against a digest or a checksum.
    """

    def __init__(
        self,
        manifest: Manifest,
        directory: Directory,
        threads: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest = manifest
        self._directory = directory
        self._threads = threads
        self._check = check
        self.is_verified = True
        self._sources: dict[int, Source] = {}
        self._users: dict[int, int] = {}
        self._sums: dict[str, dict[str, BlockSums]] = {}
        self._sums_entries = {entry.name: entry for entry in manifest.sums}
        self._lock = threading.Lock()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._sources.values():
            source.close()

    def source(self, file: int) -> Source:
        """A data file, by its number in the manifest; it stays open."""
        with self._lock:
            return self._taken(file)

    def _taken(self, file: int) -> Source:
        if file not in self._sources:
            self._sources[file] = self._directory.open(self._manifest.files[file].name)
        self._users[file] = self._users.get(file, 0) + 1
        return self._sources[file]

    @contextlib.contextmanager
    def _used(self, file: int) -> Iterator[Source]:
        """A data file, which is closed some time after: there may be more than may be open."""
        with self._lock:
            source = self._taken(file)
        try:
            yield source
        finally:
            with self._lock:
                self._users[file] -= 1
                if len(self._sources) > _MOST_OPEN and not self._users[file]:
                    self._sources.pop(file).close()

    def sums(self, file: int) -> BlockSums | None:
        """The digests of a data file; ``None`` for a checkpoint without digests."""
        if self._manifest.checksum is None:
            return None
        entry = self._manifest.files[file]
        rank = entry.name[2:].split("_")[0]
        if not rank.isdecimal():
            raise CorruptCheckpointError(f"{entry.name} is not what a data file is called")
        name = sums_name(int(rank), self._manifest.save_id)
        with self._lock:
            if name not in self._sums:
                self._sums[name] = self._read_sums(name)
            sums = self._sums[name].get(entry.name)
        if sums is None or sums.size != entry.size:
            raise CorruptCheckpointError(f"{name} does not cover {entry.name} as it was written")
        return sums

    def _read_sums(self, name: str) -> dict[str, BlockSums]:
        entry = self._sums_entries.get(name)
        if entry is None:
            raise CorruptCheckpointError(f"the manifest does not list {name}")
        data = self._directory.read(name, 0, entry.size + 1)
        assert self._manifest.checksum is not None
        if len(data) != entry.size or sums_digest(self._manifest.checksum, data) != entry.digest:
            raise ChecksumError(
                f"{name} is damaged, or belongs to another save: it does not match its digest in"
                " the manifest"
            )
        return parse_sums(data)

    def run(self, reads: dict[int, list[Read]]) -> int:
        """Do all reads with the storage's threads; the bytes read."""
        tasks = [
            (file, part)
            for is_early in (True, False)
            for file in sorted(reads)
            for part in _tasks([read for read in reads[file] if read.is_early is is_early])
        ]
        stop = threading.Event()

        def check() -> None:
            if stop.is_set():
                raise PeerFailedError("another thread of this rank has failed")
            self._check()

        def run_one(task: tuple[int, list[Read]]) -> int:
            try:
                file, part = task
                sums = self.sums(file)
                if sums is None and not all(read.has_checksum for read in part):
                    self.is_verified = False
                with self._used(file) as source:
                    return read_ranges(source, sums, part, check)
            except BaseException:
                stop.set()
                raise

        threads = min(self._threads, len(tasks))
        if threads <= 1:
            return sum(map(run_one, tasks))
        with ThreadPoolExecutor(threads, "dcp_pipeline read") as pool:
            try:
                futures = [pool.submit(run_one, task) for task in tasks]
                wait(futures)
            except BaseException:
                # No tensor may change any more once this rank begins to put them back.
                stop.set()
                raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, PeerFailedError)]
        if errors:
            raise (causes or errors)[0]
        return sum(future.result() for future in futures)


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
