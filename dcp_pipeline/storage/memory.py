"""Storage in this process's memory: for tests, and for jobs of one process."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dcp_pipeline.core.errors import (
    ConcurrentSaveError,
    ConfigError,
    CorruptCheckpointError,
    MissingFileError,
    StorageError,
)
from dcp_pipeline.core.manifest import safe_name, safe_relative_name
from dcp_pipeline.storage.base import Directory, Observer, RangeWriter, Segments, Source, Storage

__all__ = ["MemoryStorage"]

_DIRECTORIES: dict[str, dict[str, tuple[bytes | bytearray, float]]] = {}
_LOCK = threading.RLock()
"""What memory:// URIs name is the process's, as files are the machine's."""


class MemoryStorage(Storage):
    """Files in memory, under ``memory://`` URIs or any other string."""

    def open(self, checkpoint_id: str, follow_links: bool = False) -> MemoryDirectory:
        scheme, separator, _ = checkpoint_id.partition("://")
        if separator and scheme != "memory":
            raise ConfigError(
                f"storage 'memory' takes memory:// URIs, found {checkpoint_id!r}", "storage"
            )
        return MemoryDirectory(checkpoint_id.rstrip("/"))

    def folders(self, location: str) -> list[str]:
        above = f"{location.rstrip('/')}/"
        with _LOCK:
            below = [name[len(above) :] for name in _DIRECTORIES if name.startswith(above)]
        return sorted({name.partition("/")[0] for name in below})

    def retire(self, location: str) -> Callable[[], None]:
        with _LOCK:
            retired = _DIRECTORIES.pop(location.rstrip("/"), {})
        return retired.clear


class MemoryDirectory(Directory):
    """One directory in memory; see :class:`Directory` for what each method promises."""

    def __init__(self, location: str) -> None:
        self.location = location

    @property
    def _files(self) -> dict[str, tuple[bytes | bytearray, float]]:
        return _DIRECTORIES.get(self.location, {})

    def prepare(self) -> None:
        with _LOCK:
            _DIRECTORIES.setdefault(self.location, {})

    def names(self) -> list[str]:
        with _LOCK:
            return sorted(self._files)

    def names_below(self, folder: str) -> list[str]:
        with _LOCK:
            below = _DIRECTORIES.get(f"{self.location}/{safe_relative_name(folder)}", {})
            return [f"{folder}/{name}" for name in sorted(below)]

    def exists(self, name: str) -> bool:
        try:
            self._entry(name)
        except MissingFileError:
            return False
        return True

    def _entry(self, name: str) -> tuple[bytes | bytearray, float]:
        folder, _, plain = f"{self.location}/{safe_relative_name(name)}".rpartition("/")
        try:
            return _DIRECTORIES[folder][plain]
        except KeyError:
            raise MissingFileError(f"{self.location}/{name} is not there", name) from None

    def read(self, name: str, start: int = 0, limit: int | None = None) -> bytes:
        data = self._entry(name)[0]
        begin = max(len(data) + start, 0) if start < 0 else start
        return bytes(data[begin:] if limit is None else data[begin : begin + limit])

    def size(self, name: str) -> int:
        return len(self._entry(name)[0])

    def open(self, name: str) -> Source:
        return _MemorySource(self.location, name, self._entry(name)[0])

    def write(
        self, name: str, size: int, segments: Segments, observe: Observer, block_bytes: int
    ) -> None:
        data = b"".join([bytes(segment) for segment in segments])
        if len(data) != size:
            raise ValueError(f"{name}: {len(data)} bytes were produced, {size} were planned")
        observe(memoryview(data))
        self.put(name, data)

    def open_ranges(self, name: str, size: int) -> RangeWriter:
        with _LOCK:
            files = _DIRECTORIES.setdefault(self.location, {})
            data, _ = files.get(safe_name(name), (bytes(size), 0.0))
            if not isinstance(data, bytearray):
                data = bytearray(data.ljust(size, b"\0"))
                files[name] = (data, time.time())
        return _MemoryRanges(data)

    def put(self, name: str, data: bytes) -> None:
        with _LOCK:
            files = _DIRECTORIES.setdefault(self.location, {})
            if safe_name(name) in files:
                raise StorageError(f"{self.location}/{name} is there already", name, errno.EEXIST)
            files[name] = (bytes(data), time.time())

    def put_whole(self, name: str, data: bytes) -> None:
        with _LOCK:
            files = _DIRECTORIES.setdefault(self.location, {})
            files[safe_name(name)] = (bytes(data), time.time())

    def sync(self) -> None:
        return None

    def renew(self, name: str) -> None:
        with _LOCK:
            self._files[name] = (self._entry(name)[0], time.time())

    def age(self, name: str) -> float:
        return max(0.0, time.time() - self._entry(name)[1])

    def commit(
        self,
        name: str,
        data: bytes,
        expected: bytes | None,
        also: Sequence[tuple[str, bytes | None]],
    ) -> None:
        with _LOCK:
            found = self._files.get(safe_name(name))
            if (None if found is None else found[0]) != expected:
                raise ConcurrentSaveError(f"{self.location}/{name} was changed by another save")
            files = _DIRECTORIES.setdefault(self.location, {})
            for other, content in ((name, data), *also):
                files.pop(safe_name(other), None)
                if content is not None:
                    files[other] = (bytes(content), time.time())

    def token(self, name: str) -> str | None:
        found = self._files.get(safe_name(name))
        return None if found is None else f"{id(found[0])}-{found[1]}"

    def adopt(
        self,
        files: Sequence[tuple[str, str]],
        record: tuple[str, bytes] | None,
        removed: Sequence[str],
        expected: Mapping[str, str | None],
    ) -> None:
        with _LOCK:
            changed = [name for name, token in expected.items() if self.token(name) != token]
            if changed:
                raise ConcurrentSaveError(f"{self.location}/{changed[0]} was changed meanwhile")
            for name, final in files:
                self._entry(name)
                self._files[safe_name(final)] = self._files.pop(name)
            if record is not None:
                self._files[safe_name(record[0])] = (bytes(record[1]), time.time())
            self.delete(removed)

    def delete(self, names: Iterable[str]) -> None:
        with _LOCK:
            for name in names:
                self._files.pop(safe_name(name), None)


class _MemoryRanges(RangeWriter):
    def __init__(self, data: bytearray) -> None:
        self._data = data

    def write(self, offset: int, data: memoryview) -> None:
        with _LOCK:
            if len(self._data) < offset + len(data):
                self._data.extend(bytes(offset + len(data) - len(self._data)))
            self._data[offset : offset + len(data)] = data

    def close(self) -> None:
        return None

    def give_up(self) -> None:
        return None


class _MemorySource(Source):
    def __init__(self, location: str, name: str, data: bytes | bytearray) -> None:
        self.name, self.size = name, len(data)
        self._location, self._data = location, memoryview(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        piece = self._data[offset : offset + len(target)]
        if len(piece) < len(target):
            raise CorruptCheckpointError(
                f"{self.name} in {self._location} ends at byte {self.size},"
                f" {offset + len(target)} are needed: it was cut off"
            )
        target[:] = piece

    def close(self) -> None:
        return None
