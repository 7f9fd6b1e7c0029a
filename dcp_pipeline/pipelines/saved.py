"""What a save returns."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.layout.dcp_metadata import metadata_of
from dcp_pipeline.types.dcp import Metadata, StorageMeta

__all__ = ["SavedMetadata"]


class SavedMetadata(Metadata):
    """DCP's metadata of a save, made from its manifest when it is first looked at.

    At thousands of ranks the objects take seconds and gigabytes, which few callers need.

    Attributes:
        trace: time, bytes and rate per node on this rank.
    """

    def __init__(self, manifest: Manifest | bytes, location: str, trace: Trace) -> None:
        self._record = manifest
        self.trace = trace
        self._location = location

    @cached_property
    def manifest(self) -> Manifest:
        """The commit record."""
        return Manifest.decode(self._record) if isinstance(self._record, bytes) else self._record

    @cached_property
    def _made(self) -> Metadata:
        return metadata_of(self.manifest, self._location)

    @property
    def state_dict_metadata(self) -> Any:  # type: ignore[override]
        """Name to tensor or bytes metadata."""
        return self._made.state_dict_metadata

    @property
    def planner_data(self) -> Any:
        """Name to path in the nested state, as DCP flattens it."""
        return self._made.planner_data

    @property
    def storage_data(self) -> Any:
        """Index to file, offset and length."""
        return self._made.storage_data

    @property
    def storage_meta(self) -> StorageMeta | None:  # type: ignore[override]
        """Checkpoint id and save id."""
        return self._made.storage_meta

    @property
    def version(self) -> str | None:  # type: ignore[override]
        """DCP's format version."""
        return self._made.version

    def __reduce__(self) -> Any:
        made = self._made
        return Metadata, (
            made.state_dict_metadata,
            made.planner_data,
            made.storage_data,
            made.storage_meta,
            made.version,
        )
