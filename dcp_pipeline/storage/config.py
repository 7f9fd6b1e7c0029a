"""Configs of the storages, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from dcp_pipeline.core.kind import Bytes, KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.storage.filesystem import FileSystemStorage
    from dcp_pipeline.storage.memory import MemoryStorage

__all__ = ["FileSystemConfig", "MemoryConfig"]

_PAGE = 4096


def _whole_pages(size: int) -> int:
    if size % _PAGE:
        raise ValueError("expected a multiple of 4KiB")
    return size


class FileSystemConfig(KindConfig):
    """Files below a directory.

    Attributes:
        thread_count: how many threads of a rank write or read; four times as many read where each
            also copies old values (``rollback: copy``).
        sync_files: make the files durable before the checkpoint is committed.
        direct_io: write past the page cache where the file system can.
        reserve_space: reserve room for the files first, so that a full disk fails early.
        buffer_bytes: size of a thread's buffer.
        stale_after_seconds: a save on another host that has not renewed its mark for so long is
            taken for dead.
    """

    kind: Literal["filesystem"] = "filesystem"
    thread_count: int = Field(default=2, ge=1, le=64)
    sync_files: bool = True
    direct_io: bool = True
    reserve_space: bool = True
    buffer_bytes: Annotated[Bytes, AfterValidator(_whole_pages)] = 8 * 1024**2
    stale_after_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)

    def build(self) -> FileSystemStorage:
        """Make the storage."""
        from dcp_pipeline.storage.filesystem import FileSystemStorage

        return FileSystemStorage(
            thread_count=self.thread_count,
            sync_files=self.sync_files,
            direct_io=self.direct_io,
            reserve_space=self.reserve_space,
            buffer_bytes=self.buffer_bytes,
            stale_after_seconds=self.stale_after_seconds,
        )


class MemoryConfig(KindConfig):
    """This process's memory, for tests."""

    works_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"background": ("thread",)}

    kind: Literal["memory"] = "memory"

    def build(self) -> MemoryStorage:
        """Make the storage."""
        from dcp_pipeline.storage.memory import MemoryStorage

        return MemoryStorage()
