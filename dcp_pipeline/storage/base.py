"""Where bytes go: the interface of a kind of storage.

A :class:`Storage` is configured once and opens a :class:`Directory` per checkpoint. Names within
a directory are plain file names; those that read (``read``, ``open``, ``size``, ``exists``) also
take files in folders below it, as ``folder/name``. What each verb promises is said in its
docstring; the contract tests in ``dcp_pipeline.testing`` hold every kind to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

__all__ = [
    "Directory",
    "Observer",
    "RangeWriter",
    "Segments",
    "Source",
    "Storage",
    "file_reader",
]

Segments = Iterable[memoryview]
"""The bytes of a file in order, as contiguous views; each is valid until the next is asked for."""

Observer = Callable[[memoryview], None]
"""Sees the bytes of a file in order, in whole multiples of the block size but for the last."""


class Source(ABC):
    """A file open for reading, from several threads at once.

    Attributes:
        name: its name in the directory.
        size: bytes.
    """

    name: str
    size: int

    @abstractmethod
    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``offset`` on.

        Raises:
            CorruptCheckpointError: the file ends before that.
            StorageError: the system's own error.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the file back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def file_reader(source: Source) -> Callable[[int, int], bytes]:
    """``(offset, nbytes)`` to bytes of an open file."""

    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        source.read_into(offset, memoryview(data))
        return bytes(data)

    return read


class RangeWriter(ABC):
    """A file that is written range by range, by several threads and several ranks at once."""

    @abstractmethod
    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset; what is never written holds zeros."""

    @abstractmethod
    def close(self) -> None:
        """Make durable what this one has written, and give the file back; once is enough."""

    @abstractmethod
    def give_up(self) -> None:
        """Give the file back as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.give_up()


class Directory(ABC):
    """The files of one checkpoint.

    Attributes:
        location: the path or URI, for messages.
    """

    location: str

    @abstractmethod
    def prepare(self) -> None:
        """Make the directory where the storage has such a thing."""

    @abstractmethod
    def names(self) -> list[str]:
        """The files in it, sorted; empty when there is no such directory."""

    @abstractmethod
    def names_below(self, folder: str) -> list[str]:
        """The files in a folder of it, as ``folder/name``, sorted; empty when there is none.

        Raises:
            UnsafeCheckpointError: the folder leads out of the directory.
        """

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether the file is there."""

    @abstractmethod
    def read(self, name: str, start: int = 0, limit: int | None = None) -> bytes:
        """The bytes of a whole file, or at most ``limit`` from ``start`` on.

        A negative ``start`` counts from the end.

        Raises:
            MissingFileError: it is not there.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            MissingFileError: it is not there.
        """

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open for reading.

        Raises:
            MissingFileError: it is not there.
            UnsafeCheckpointError: the name leads out of the directory.
        """

    @abstractmethod
    def write(
        self, name: str, size: int, segments: Segments, observe: Observer, block_bytes: int
    ) -> None:
        """Write a new data file of exactly ``size`` bytes and make it durable.

        Room is reserved first, so that a full disk fails before anything is written. An existing
        file of that name is an error. ``observe`` sees every byte once, in order, in multiples of
        ``block_bytes`` but for the end. On an error the part written so far may remain.
        """

    @abstractmethod
    def open_ranges(self, name: str, size: int) -> RangeWriter:
        """Open a file of ``size`` bytes to write ranges of it; made where it is not there.

        Ranks that write one file each open it so, with one size, in any order. Room is reserved
        first, so that a full disk fails before anything is written.

        Raises:
            StorageError: the system's own error.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small new file and make it durable."""

    def put_whole(self, name: str, data: bytes) -> None:
        """As :meth:`put`, but the file is never there without all its bytes.

        What a process leaves that ends meanwhile is named ``{name}.{eight hex digits}.tmp``. Others
        may remove that at any time, and the file is then written again.
        """
        self.put(name, data)

    @abstractmethod
    def sync(self) -> None:
        """Make the entries of the directory itself durable."""

    @abstractmethod
    def renew(self, name: str) -> None:
        """Set the age of a file to zero."""

    @abstractmethod
    def age(self, name: str) -> float:
        """Seconds since a file was written or renewed.

        Raises:
            MissingFileError: it is not there.
        """

    @abstractmethod
    def commit(
        self,
        name: str,
        data: bytes,
        expected: bytes | None,
        also: Sequence[tuple[str, bytes | None]],
    ) -> None:
        """Replace ``name`` by ``data`` in one atomic step, if it still holds ``expected``.

        Then the files in ``also`` are replaced one by one (removed where the bytes are ``None``),
        and all of it is made durable. ``expected`` is ``None`` for a file that must not be there.

        Raises:
            ConcurrentSaveError: the file holds something else by now, or another save commits at
                this moment. Nothing was changed.
        """

    @abstractmethod
    def token(self, name: str) -> str | None:
        """Text that changes when a file is replaced; ``None`` where there is none."""

    @abstractmethod
    def adopt(
        self,
        files: Sequence[tuple[str, str]],
        record: tuple[str, bytes] | None,
        removed: Sequence[str],
        expected: Mapping[str, str | None],
    ) -> None:
        """Give finished files their final names, and with the last step let them be what counts.

        Args:
            files: names and the final names that they get, one after another, each in one atomic
                step that replaces what had that name.
            record: put in place behind them, atomically.
            removed: names of files that are removed behind that.
            expected: the tokens that files still have to have.

        Raises:
            ConcurrentSaveError: a file has another token by now, or another save commits at this
                moment. Nothing was changed.
        """

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove files; one that is gone already is no error."""

    def remove_if_empty(self) -> None:
        """Remove the directory itself where nothing is in it, if the storage has such a thing."""
        return None


class Storage(ABC):
    """A configured kind of storage.

    Attributes:
        thread_count: files that a rank writes, or threads that it reads with, at a time.
        stale_after: seconds after which a save that did not renew its marker counts as dead.
    """

    thread_count: int = 1
    stale_after: float = 600.0

    @abstractmethod
    def open(self, checkpoint_id: str, follow_links: bool = False) -> Directory:
        """The directory of one checkpoint; nothing is touched yet.

        Args:
            follow_links: read files through links that lead out of the directory, as those of a
                Hugging Face cache do. What they lead to still has to be a regular file. Passed
                only for layouts that want it.

        Raises:
            ConfigError: the id is of a scheme that this storage does not serve.
        """

    @abstractmethod
    def folders(self, location: str) -> list[str]:
        """The names of the directories right below a location, sorted; empty where nothing is."""

    @abstractmethod
    def retire(self, location: str) -> Callable[[], None]:
        """Take a checkpoint out of sight in one step; a reader finds all of it or nothing.

        What is returned deletes it; it may be called later, and from another thread.
        """

    def close(self) -> None:
        """Give back buffers and connections."""
        return None
