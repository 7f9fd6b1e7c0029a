"""``MegaStorageWriter`` and ``MegaStorageReader``: MEGA repositories under DCP's save and load."""

from __future__ import annotations

import os
from typing import Any

from dcp_pipeline.dcp.reader import FileSystemReader
from dcp_pipeline.dcp.writer import FileSystemWriter
from dcp_pipeline.types.dcp import Metadata

__all__ = ["MegaStorageReader", "MegaStorageWriter"]


class MegaStorageWriter(FileSystemWriter):
    """Writes ``model.mega``, or shards and their index, under DCP's ``save`` or ours.

    Args:
        path: directory of the checkpoint, a path or a ``file://`` URI.
        sync_files, thread_count, overwrite: as in torch's ``FileSystemWriter``.
        serialization: settings of the files, see :class:`MegaConfig`.
        layout: settings of the repository, see :class:`MegaLayoutConfig`.

    Raises:
        ConfigError: a setting that is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        sync_files: bool | None = None,
        thread_count: int | None = None,
        overwrite: bool | None = None,
        serialization: dict[str, Any] | None = None,
        layout: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            path,
            sync_files=sync_files,
            thread_count=thread_count,
            overwrite=overwrite,
            config={
                "layout": {"kind": "mega", **(layout or {})},
                "serialization": {"kind": "mega", **(serialization or {})},
            },
        )


class MegaStorageReader(FileSystemReader):
    """Reads MEGA repositories, ours or anybody's, under DCP's ``load`` or ours.

    Args:
        path: directory of the repository, a path or a ``file://`` URI.
        thread_count: threads that read.
        verify: compare what is read with the checksums of the format.
    """

    def __init__(
        self, path: str | os.PathLike[str], thread_count: int = 1, verify: bool = True
    ) -> None:
        config = {
            "layout": {"kind": "mega", "verify": verify},
            "storage": {"thread_count": thread_count},
        }
        super().__init__(path, config=config)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the repository holds; no rank has metadata of its own."""
        return super().read_metadata()
