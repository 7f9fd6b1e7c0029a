"""Node ``commit``: the only point at which a checkpoint starts to exist."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import numpy as np
import torch

from dcp_pipeline.core.contributions import fingerprints_of
from dcp_pipeline.core.errors import (
    CheckpointError,
    ConcurrentSaveError,
    CoordinationError,
    FormatError,
    PeerFailedError,
    UnfinishedCommitError,
)
from dcp_pipeline.core.fingerprint import Fingerprint, make_fingerprint
from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.manifest import FileEntry, Manifest, SumsEntry, check_places
from dcp_pipeline.core.packing import pack_columns, unpack_columns
from dcp_pipeline.core.spans import Span, decode_spans, encode_spans, moved
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.layout.export import ExportLayout
from dcp_pipeline.layout.record import dead_names
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.steps.commit_outcome import say_outcome
from dcp_pipeline.pipelines.steps.export_commit import fill_headers, is_published, shared_manifest
from dcp_pipeline.pipelines.values import CoordinatorPlan, Receipt, Share
from dcp_pipeline.planning.base import GlobalPlan
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = [
    "commit",
    "encode_receipt",
    "publish",
    "publish_export",
    "remove_dead_files",
    "versions",
]

logger = logging.getLogger("dcp_pipeline")

_UNCERTAIN = "it is not known whether the save was committed"


def commit(
    share: Share | None, receipt: Receipt | None, job: SaveJob, failure: BaseException | None
) -> Manifest:
    """Send the receipt; the coordinator checks all of them and publishes the manifest."""
    message: bytes | BaseException
    if failure is not None or receipt is None:
        message = failure or RuntimeError("there is no receipt")
    else:
        message = encode_receipt(receipt)
    is_coordinator = job.coordinator.is_coordinator
    # Once the receipt is on its way the files may be those of a committed checkpoint.
    job.may_delete = isinstance(message, BaseException)
    has_answer = False
    try:
        answer = job.coordinator.exchange(
            "commit", message, lambda messages: _publish(messages, job)
        )
        has_answer = True
        record = job.coordinator.broadcast("commit", answer if is_coordinator else None)
    except BaseException as error:
        # Contact may be lost or the outcome be open, but not where the coordinator never tried.
        has_never_tried = is_coordinator and job.give_up()
        job.may_delete = job.may_delete or has_never_tried or _is_abort(error)
        say_outcome(error, job, has_answer)
        raise
    return Manifest.decode(record) if job.committed is None else job.committed


def _is_abort(error: BaseException) -> bool:
    """Whether the coordinator has said that nothing was committed."""
    is_open = isinstance(error, (CoordinationError, UnfinishedCommitError))
    is_open = is_open and not isinstance(error, PeerFailedError)
    return isinstance(error, CheckpointException) and not is_open


def encode_receipt(receipt: Receipt) -> bytes:
    header: dict[str, Any] = {
        "seconds": receipt.seconds,
        "files": [[entry.name, entry.size] for entry in receipt.files],
        "sums": receipt.sums and [receipt.sums.name, receipt.sums.size, receipt.sums.digest],
    }
    if receipt.encoded:
        header["encoded"] = encode_spans(receipt.encoded)
    columns = {
        "file": receipt.file,
        "offset": receipt.offset,
        "length": receipt.length,
        "payload": receipt.payload,
    }
    words = () if receipt.fingerprint is None else (receipt.fingerprint.astype("<u8").tobytes(),)
    return frame(header, pack_columns(columns), *words)


def _publish(messages: list[bytes], job: SaveJob) -> list[bytes]:
    """On the coordinator: check the receipts and commit."""
    if isinstance(job.parts.layout, ExportLayout):
        return _publish_export(messages, job, job.parts.layout)
    assert job.plan is not None and job.plan.plan is not None
    manifest = _assemble(messages, job.plan.plan, job)
    check_places(manifest)
    record = publish(
        job,
        *job.parts.layout.companions(
            manifest, job.directory.location, job.parts.serialization.dcp_reads
        ),
    )
    answers = [b""] * job.coordinator.world_size
    answers[job.coordinator.rank] = record
    return answers


def _publish_export(messages: list[bytes], job: SaveJob, layout: ExportLayout) -> list[bytes]:
    """As :func:`_publish`, where the files' names and contents are those that others lay down."""
    plan, directory = job.plan, job.directory
    assert plan is not None and plan.plan is not None
    if layout.shares_files:
        manifest = shared_manifest(messages, job, versions())
        parts = fill_headers(job, layout, manifest)
    else:
        manifest = _assemble(messages, plan.plan, job)
        manifest, parts = layout.named(directory, manifest)
    answers = [b""] * job.coordinator.world_size
    answers[job.coordinator.rank] = publish_export(job, layout, manifest, parts)
    return answers


def publish_export(
    job: SaveJob, layout: ExportLayout, manifest: Manifest, parts: Mapping[str, str]
) -> bytes:
    """As :func:`publish`, where files get their final names.

    Args:
        parts: the names that the files have until then, by final name.
    """
    plan, directory = job.plan, job.directory
    assert plan is not None
    check_places(manifest)
    publication = layout.publication(directory, manifest, parts, plan.files)
    tokens = {part: directory.token(part) for part, _ in publication.files}
    expected = {**plan.tokens, **tokens}
    finals = [final for _, final in publication.files if layout.may_be_left(final)]
    if job.heartbeat is not None:
        job.heartbeat.note([*finals, *filter(layout.may_be_left, publication.removed)])
    _begin(job)
    try:
        directory.adopt(publication.files, publication.record, publication.removed, expected)
    except ConcurrentSaveError:
        raise
    except BaseException as error:
        if not is_published(directory, publication, tokens, _UNCERTAIN):
            job.has_tried_to_commit = False
            # Those that had their final names already are of no use to anybody.
            job.written += finals
            raise
        _raise_unfinished(job, manifest, error)
    job.committed = manifest
    _tidy(job, plan)
    return manifest.encode()


def publish(job: SaveJob, manifest: Manifest, also: list[tuple[str, bytes | None]]) -> bytes:
    """Replace the commit record and what goes with it, then tidy up; the record's bytes.

    Raises:
        ConcurrentSaveError: another save has committed meanwhile.
        UnfinishedCommitError: this one has, but it may not be durable.
        CoordinationError: it cannot be told whether this one has.
    """
    plan, directory, name = job.plan, job.directory, job.parts.layout.record
    assert plan is not None
    record = manifest.encode()
    _begin(job)
    try:
        directory.commit(name, record, plan.record, also)
    except ConcurrentSaveError:
        raise
    except BaseException as error:
        if not _is_committed(directory, name, record, plan.record, error):
            job.has_tried_to_commit = False
            raise
        _raise_unfinished(job, manifest, error)
    job.committed = manifest
    _tidy(job, plan)
    return record


def _begin(job: SaveJob) -> None:
    """The last look before the commit.

    Raises:
        ConcurrentSaveError: another process has given this save up.
    """
    marker = job.parts.layout.marker_name(job.save_id)
    if not job.directory.exists(marker):
        raise ConcurrentSaveError(
            f"{marker} is gone from {job.directory.location}: another process took this save for"
            " dead, and removes what it has written. storage.stale_after_seconds says after how"
            " long"
        )
    job.ask_guard()
    job.begin_commit()


def _raise_unfinished(job: SaveJob, manifest: Manifest, error: BaseException) -> NoReturn:
    # A loss of power may bring the old one back, so its files stay.
    job.committed = manifest
    if not isinstance(error, Exception):
        raise error
    location = job.directory.location
    raise UnfinishedCommitError(
        f"{location} holds the new checkpoint, but the save could not be finished:"
        f" {str(error) or type(error).__name__}. It may not survive a loss of power, and plain DCP"
        " may see the one before. Nothing was deleted; save once more",
        location,
        getattr(error, "errno", None),
    ) from error


def _is_committed(
    directory: Directory, name: str, record: bytes, before: bytes | None, error: BaseException
) -> bool:
    """Whether a commit that raised was made; if not, the record is what it was before.

    Raises:
        CoordinationError: that cannot be told, so nothing may be deleted.
    """
    try:
        found = directory.read(name) if directory.exists(name) else None
    except CheckpointError as reading:
        raise CoordinationError(f"{_UNCERTAIN}: {error}; then {reading}") from error
    if found == record:
        return True
    if found == before:
        return False
    raise CoordinationError(f"{_UNCERTAIN}: {error}; {name} holds yet another save") from error


def _assemble(messages: list[bytes], plan: GlobalPlan, job: SaveJob) -> Manifest:
    """The manifest, if the receipts fit the plan."""
    files: list[FileEntry] = []
    sums: list[SumsEntry] = []
    columns: dict[str, list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]] = {
        name: [] for name in ("file", "offset", "length", "payload")
    }
    table = plan.table
    planned = np.bincount(table.owner, minlength=len(messages))
    encoded: dict[int, tuple[Span, ...]] = {}
    begin = 0
    words: list[bytes] = []
    seconds: list[float] = []
    for rank, message in enumerate(messages):
        header, (packed, *rest) = unframe(message)
        words += rest
        seconds.append(header["seconds"])
        received = unpack_columns(packed)
        count = len(received["file"])
        has_sums = bool(count) and bool(job.parts.layout.checksum)
        if count != planned[rank] or has_sums != bool(header["sums"]):
            raise FormatError(
                f"rank {rank} reports {count} chunks, {planned[rank]} were planned for it"
            )
        if "encoded" in header:
            spans_of = decode_spans(header["encoded"])
            encoded |= {begin + row: spans for row, spans in spans_of.items()}
        begin += count
        received["file"] = received["file"] + len(files)
        for name, parts in columns.items():
            parts.append(received[name])
        files += [FileEntry(name, size) for name, size in header["files"]]
        if header["sums"]:
            sums.append(SumsEntry(*header["sums"]))
    places = {name: np.concatenate(parts) for name, parts in columns.items()}
    job.slowest_writer = max(zip(seconds, range(len(seconds)), strict=True))[::-1]
    placed = ChunkTable.from_columns(table.keys, table.columns("key", "owner") | places)
    order = placed.order()
    layout = job.parts.layout
    assert job.plan is not None
    return Manifest(
        save_id=job.save_id,
        created=time.time(),
        world_size=job.coordinator.world_size,
        serialization=job.parts.serialization.kind,
        layout=layout.kind,
        names=plan.names,
        table=placed.take(order),
        files=tuple(files),
        sums=tuple(sums),
        checksum=layout.checksum or None,
        block_bytes=layout.block_bytes,
        versions=versions(),
        config=job.parts.recorded_config(),
        empty=job.plan.empty,
        superseded=job.plan.superseded,
        notes=job.notes,
        fingerprint=_fingerprint(plan, words) if words else None,
        encoded=moved(encoded, order),
    )


def _fingerprint(plan: GlobalPlan, words: list[bytes]) -> Fingerprint:
    """Of what all ranks have written, whose chunks were proven to tile the state."""
    parts = np.frombuffer(b"".join(words), "<u8")
    keys = plan.table.keys
    return make_fingerprint(plan.names, keys, fingerprints_of(plan.table, parts))


def versions() -> dict[str, str]:
    """What a manifest says about the software that made it."""
    try:
        own = version("dcp-pipeline")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "dcp_pipeline": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def remove_dead_files(job: SaveJob) -> None:
    """Delete what saves have left whose processes are gone; never raises."""
    directory, layout = job.directory, job.parts.layout
    try:
        stale_after = job.parts.storage.stale_after
        needed = partial(layout.needed, directory)
        directory.delete(dead_names(directory, needed, stale_after, layout.save_of))
    except (CheckpointError, OSError) as error:
        logger.warning("files in %s could not be removed: %s", directory.location, error)


def _tidy(job: SaveJob, plan: CoordinatorPlan) -> None:
    """Delete what the replaced checkpoint and dead saves have left; never fails the save."""
    directory, layout = job.directory, job.parts.layout
    try:
        stale_after = job.parts.storage.stale_after
        needed = partial(layout.needed, directory)
        dead = dead_names(directory, needed, stale_after, layout.save_of, own=job.save_id[:8])
        replaced = plan.replaced & set(directory.names())
        if replaced and layout.is_export:
            # What is committed by now may have taken such a name again.
            replaced -= set(needed())
        directory.delete([*dead, *replaced])
        if plan.replaced:
            # Only the marker names them, so it may go once they are gone for good.
            directory.sync()
        job.is_tidy = True
    except (CheckpointError, OSError) as error:
        logger.warning("old files in %s could not be removed: %s", directory.location, error)
