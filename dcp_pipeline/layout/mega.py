"""Layout ``mega``: a repository of MEGA files, one or several shards with an index."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, NoReturn

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.layout.mega_names import INDEX
from dcp_pipeline.layout.mega_reading import mega_manifest
from dcp_pipeline.storage.base import Directory

__all__ = ["MegaLayout"]


class MegaLayout(Layout):
    """``model.mega``, or shards and ``model.mega.index.json``.

    Args:
        verify: compare what is read with the checksums of the format, where there are any. A part
            of a tensor can then be read only with all that its checksum covers.
    """

    kind: ClassVar[str] = "mega"
    record: ClassVar[str] = INDEX
    follows_links: ClassVar[bool] = True

    def __init__(self, verify: bool = True) -> None:
        self.checksum = "xxh3_64"
        self.block_bytes = 64 << 10
        self._verify = verify

    def open(self, directory: Directory) -> Manifest:
        return mega_manifest(directory, self._verify)

    def save_of(self, name: str) -> str | None:
        return None

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        _cannot_write()

    def sums_name(self, rank: int, save_id: str) -> str:
        _cannot_write()

    def marker_name(self, save_id: str) -> str:
        _cannot_write()

    def companions(
        self, manifest: Manifest, location: str, dcp_reads: bool
    ) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
        _cannot_write()

    def current(self, directory: Directory) -> tuple[bytes | None, str | None]:
        _cannot_write()

    def replaced_names(self, directory: Directory) -> Collection[str]:
        _cannot_write()

    def needed(self, directory: Directory) -> Collection[str]:
        _cannot_write()

    def committed_save(self, directory: Directory) -> str | None:
        _cannot_write()


def _cannot_write() -> NoReturn:
    raise ConfigError(
        "layout 'mega' is read, not written: save with layout=dcp serialization=mega", "layout"
    )
