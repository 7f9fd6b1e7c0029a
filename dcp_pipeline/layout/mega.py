"""Layout ``mega``: a repository of MEGA files, one or several shards with an index."""

from __future__ import annotations

from typing import ClassVar

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.mega_reading import mega_manifest, saved_by
from dcp_pipeline.layout.mega_writing import MegaWriting
from dcp_pipeline.storage.base import Directory

__all__ = ["MegaLayout"]


class MegaLayout(MegaWriting):
    """``model.mega``, or shards and ``model.mega.index.json``.

    Args:
        verify: compare what is read with the checksums of the format, where there are any. A part
            of a tensor can then be read only with all that its checksum covers.
        tied: see :class:`MegaWriting`.
    """

    kind: ClassVar[str] = "mega"
    follows_links: ClassVar[bool] = True

    def __init__(self, verify: bool = True, tied: str = "drop") -> None:
        super().__init__(tied)
        self._verify = verify

    def open(self, directory: Directory) -> Manifest:
        return mega_manifest(directory, self._verify)

    def committed_save(self, directory: Directory) -> str | None:
        return saved_by(directory)
