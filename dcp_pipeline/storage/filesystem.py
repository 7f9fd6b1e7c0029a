"""Storage on a POSIX file system, local or shared."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote, urlsplit

from dcp_pipeline.core.errors import (
    ConfigError,
    StorageError,
)
from dcp_pipeline.storage.base import Storage
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.file_directory import FileSystemDirectory
from dcp_pipeline.storage.file_writer import BufferPool

__all__ = ["FileSystemStorage", "local_path"]

_ATTEMPTS = 2
_SMALL_BYTES = 1 << 20
# Opening a pipe would wait for somebody to write into it.
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def local_path(checkpoint_id: str | os.PathLike[str]) -> str:
    """The path that a path or a ``file://`` URI names.

    Raises:
        ConfigError: the id is a URI of another scheme.
    """
    text = os.fspath(checkpoint_id)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return os.path.abspath(os.path.expanduser(text))
    parts = urlsplit(text)
    if scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(
            f"storage 'filesystem' takes paths and file:// URIs, found {text!r}", "storage"
        )
    return os.path.abspath(unquote(parts.path))


class FileSystemStorage(Storage):
    """Files in a directory.

    Args:
        thread_count: files that a rank writes at a time, and threads that it reads with.
        sync_files: wait until data is durable before the commit. Off, a loss of power can damage
            a committed checkpoint.
        direct_io: leave out the page cache when writing, where the file system allows it.
        reserve_space: reserve room for a file before anything is written.
        buffer_bytes: size of a thread's I/O buffer.
        stale_after_seconds: after which a save on another host that did not renew its marker is
            dead.
        changes: what makes the changes; tests replace it.
    """

    def __init__(
        self,
        thread_count: int = 2,
        sync_files: bool = True,
        direct_io: bool = True,
        reserve_space: bool = True,
        buffer_bytes: int = 8 << 20,
        stale_after_seconds: float = 600.0,
        changes: FileChanges | None = None,
    ) -> None:
        self.thread_count = thread_count
        self.stale_after = stale_after_seconds
        self.sync_files = sync_files
        self.direct_io = direct_io
        self.reserve_space = reserve_space
        self.changes = changes or FileChanges()
        self.buffers = BufferPool(buffer_bytes)

    def open(self, checkpoint_id: str, follow_links: bool = False) -> FileSystemDirectory:
        return FileSystemDirectory(self, local_path(checkpoint_id), follow_links)

    def folders(self, location: str) -> list[str]:
        path = local_path(location)
        try:
            with os.scandir(path) as entries:
                return sorted(entry.name for entry in entries if os.path.isdir(entry.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror}", path, error.errno) from error

    def retire(self, location: str) -> Callable[[], None]:
        parent, name = os.path.split(local_path(location))
        aside = os.path.join(parent, f".removed-{name}-{os.urandom(4).hex()}")
        self.changes.replace(os.path.join(parent, name), aside)
        return partial(self._delete, aside)

    def _delete(self, aside: str) -> None:
        # Its old name must not come back, after a loss of power, with half of the files.
        self.changes.sync_directory(os.path.dirname(aside))
        if os.path.islink(aside):
            self.changes.remove(aside)
        else:
            self.changes.remove_tree(aside)

    def close(self) -> None:
        self.buffers.close()
