"""The commit of a save whose plan DCP's objects made."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import CorruptCheckpointError
from dcp_pipeline.core.manifest import FileEntry, Manifest, MetadataEntry, check_places
from dcp_pipeline.formats.metadata_pickle import write_metadata
from dcp_pipeline.layout.dcp_metadata import manifest_of
from dcp_pipeline.layout.export import ExportLayout
from dcp_pipeline.layout.names import METADATA
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.steps.save_commit import publish, publish_export, versions
from dcp_pipeline.pipelines.values import Receipt
from dcp_pipeline.types.dcp import Metadata, StorageMeta, WriteResult

__all__ = ["PlacedResult", "commit_results"]


@dataclass(frozen=True)
class PlacedResult(WriteResult):
    """One item that was written.

    Attributes:
        receipt: on the first result of a rank, what the rank has written altogether.
    """

    receipt: Receipt | None = None


def commit_results(job: SaveJob, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Make a manifest of what all ranks have written, and commit it with DCP's ``.metadata``.

    ``metadata`` gets its storage data, as DCP's own writer gives it.

    Raises:
        CorruptCheckpointError: the results do not fit the plan.
    """
    metadata.storage_data = {r.index: r.storage_data for rank in results for r in rank}
    metadata.storage_meta = StorageMeta(checkpoint_id=job.directory.location, save_id=job.save_id)
    receipts = [_receipt(rank) for rank in results if rank]
    files = [entry for receipt in receipts for entry in receipt.files]
    manifest = _placed(manifest_of(metadata, {f.name: f.size for f in files}), receipts, files)
    layout, serialization = job.parts.layout, job.parts.serialization
    assert job.plan is not None
    manifest = replace(
        manifest,
        save_id=job.save_id,
        created=time.time(),
        world_size=len(results),
        serialization=serialization.kind,
        layout=layout.kind,
        sums=tuple(receipt.sums for receipt in receipts if receipt.sums is not None),
        checksum=layout.checksum or None,
        block_bytes=layout.block_bytes,
        versions=versions(),
        config=job.parts.recorded_config(),
        superseded=job.plan.superseded,
    )
    if isinstance(layout, ExportLayout):
        publish_export(job, layout, *layout.named(job.directory, manifest))
        return
    check_places(manifest)
    publish(job, *_with_metadata(job, manifest, metadata))


def _receipt(results: list[WriteResult]) -> Receipt:
    first = results[0]
    receipt = first.receipt if isinstance(first, PlacedResult) else None
    if receipt is None or len(receipt.file) != len(results):
        raise CorruptCheckpointError("a rank's results are not what its writer returned")
    return receipt


def _placed(manifest: Manifest, receipts: list[Receipt], files: list[FileEntry]) -> Manifest:
    """The manifest with the payload of every chunk, and with every file in it."""
    number = {entry.name: position for position, entry in enumerate(files)}
    payload = {
        (number[receipt.files[file].name], int(offset)): int(start)
        for receipt in receipts
        for file, offset, start in zip(receipt.file, receipt.offset, receipt.payload, strict=True)
    }
    table = manifest.table
    file = np.asarray([number[entry.name] for entry in manifest.files], np.int64)[table.file]
    spans = {
        (number[receipt.files[receipt.file[row]].name], int(receipt.offset[row])): found
        for receipt in receipts
        for row, found in receipt.encoded.items()
    }
    places = list(zip(file.tolist(), table.offset.tolist(), strict=True))
    starts = [payload[place] for place in places]
    encoded = {row: spans[place] for row, place in enumerate(places) if place in spans}
    placed = replace(table, file=file, payload=np.asarray(starts, np.int64))
    return replace(manifest, table=placed, files=tuple(files), encoded=encoded)


def _with_metadata(
    job: SaveJob, manifest: Manifest, metadata: Metadata
) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
    """DCP's ``.metadata`` as the planner made it, which may hold more than ours would."""
    _, also = job.parts.layout.companions(
        manifest, job.directory.location, job.parts.serialization.dcp_reads
    )
    if also != [(METADATA, None)]:
        data = write_metadata(metadata)
        entry = MetadataEntry(len(data), digest_of("xxh3_64", data).hex())
        return replace(manifest, metadata=entry), [(METADATA, data)]
    return manifest, also
