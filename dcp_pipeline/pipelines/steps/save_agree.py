"""Node ``agree`` of the save: one checkpoint, one config, one plan."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    ConcurrentSaveError,
    DisagreementError,
    MissingFileError,
    ShapeConflictError,
    list_some,
)
from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.packing import Column, pack_columns, unpack_columns
from dcp_pipeline.core.path import Path, decode_path, dotted, encode_path
from dcp_pipeline.core.table import ChunkTable, KeySpec
from dcp_pipeline.layout.export import ExportLayout, PlannedFile
from dcp_pipeline.layout.marker import replaced_by_killed
from dcp_pipeline.layout.record import is_live_marker
from dcp_pipeline.pipelines.job import Heartbeat, SaveJob
from dcp_pipeline.pipelines.values import CoordinatorPlan, Places, Share
from dcp_pipeline.planning.base import GlobalPlan

__all__ = ["agree", "answer_to", "same_everywhere", "start_save", "unpacked_plans"]


def agree(local_plan: ChunkTable | None, job: SaveJob, failure: BaseException | None) -> Share:
    """Send the local plan, receive this rank's share of the global one."""
    message: bytes | BaseException
    if failure is not None or local_plan is None:
        message = failure or RuntimeError("there is no local plan")
    else:
        header = {
            "checkpoint_id": job.directory.location,
            "config": job.parts.config.digest(),
            "empty": [[encode_path(path), kind] for path, kind in job.empty],
        }
        # The coordinator has its own plan at hand.
        message = frame(header, b"" if job.coordinator.is_coordinator else local_plan.pack())
    answer = job.coordinator.exchange(
        "agree", message, lambda messages: _decide(messages, job, local_plan)
    )
    header, (columns,) = unframe(answer)
    job.save_id = header["save_id"]
    unpacked = unpack_columns(columns)
    assert local_plan is not None
    renamed = header["renamed"]
    names = tuple(
        renamed.get(str(local)) or dotted(spec.path) for local, spec in enumerate(local_plan.keys)
    )
    return Share(
        names,
        unpacked["row"],
        unpacked["offsets"],
        unpacked["sizes"],
        header["total_bytes"],
        None
        if "files" not in header
        else Places(
            tuple((name, size) for name, size in header["files"]),
            unpacked["file"],
            unpacked["start"],
        ),
    )


def same_everywhere(headers: list[dict[str, Any]]) -> None:
    """Raise unless all ranks name the same checkpoint and config.

    Raises:
        DisagreementError: naming what each group of ranks has.
    """
    for member, what in (("checkpoint_id", "checkpoint"), ("config", "config (digests)")):
        ranks: dict[str, list[int]] = {}
        for rank, header in enumerate(headers):
            ranks.setdefault(header[member], []).append(rank)
        if len(ranks) > 1:
            sides = "; ".join(f"ranks {who}: {value}" for value, who in ranks.items())
            raise DisagreementError(f"the ranks do not name the same {what}: {sides}")


def _decide(messages: list[bytes], job: SaveJob, own: ChunkTable | None) -> list[bytes]:
    """On the coordinator: the global plan, and each rank's share of it."""
    unframed = [unframe(message) for message in messages]
    headers = [header for header, _ in unframed]
    same_everywhere(headers)
    assert own is not None
    tables = unpacked_plans([blobs[0] for _, blobs in unframed], own, job.coordinator.rank)
    plan = job.parts.planner.global_plan(tables)
    start_save(job, plan, _empty(headers, plan))
    if not isinstance(job.parts.layout, ExportLayout) or not job.parts.layout.shares_files:
        return [answer_to(plan, rank, job.save_id) for rank in range(len(tables))]
    files = plan_files(job, job.parts.layout, plan)
    return [answer_to(plan, rank, job.save_id, files) for rank in range(len(tables))]


def unpacked_plans(packed: list[bytes], own: ChunkTable, rank: int) -> list[ChunkTable]:
    """The local plans of all ranks, of which ``rank`` has its own at hand."""
    cache: dict[bytes, tuple[KeySpec, ...]] = {}
    return [
        own if number == rank else ChunkTable.unpack(data, cache)
        for number, data in enumerate(packed)
    ]


def _empty(headers: list[dict[str, Any]], plan: GlobalPlan) -> tuple[tuple[Path, str], ...]:
    """Containers that are empty wherever they are; on other ranks keys may lie below them."""
    inner = {spec.path[:depth] for spec in plan.table.keys for depth in range(len(spec.path))}
    found = {decode_path(path): kind for header in headers for path, kind in header["empty"]}
    clashing = [dotted(spec.path) for spec in plan.table.keys if spec.path in found]
    if clashing:
        raise ShapeConflictError(
            f"some ranks hold an empty dict where others hold a value: {list_some(clashing)}. Wrap"
            " what each rank has of its own in RankLocal"
        )
    return tuple((path, kind) for path, kind in found.items() if path not in inner)


def start_save(
    job: SaveJob, plan: GlobalPlan | None = None, empty: tuple[tuple[Path, str], ...] = ()
) -> None:
    """On the coordinator: look at what is there, and say that a save is under way.

    Raises:
        CheckpointExistsError: there is a checkpoint and the config does not overwrite.
    """
    job.ask_guard()
    directory, layout = job.directory, job.parts.layout
    record, superseded = layout.current(directory)
    if job.parts.config.overwrite == "error" and (record is not None or superseded is not None):
        raise CheckpointExistsError(
            f"{directory.location} holds a checkpoint already and overwrite is 'error': save"
            " elsewhere, or set overwrite=replace",
            directory.location,
        )
    save_id = job.lasting_id or uuid.uuid4().hex
    _refuse_twin(job, layout.marker_name(save_id))
    inherited = replaced_by_killed(directory, job.parts.storage.stale_after, layout.may_be_left)
    replaced = inherited.union(layout.replaced_names(directory))
    tokens = layout.watched(directory) if isinstance(layout, ExportLayout) else {}
    job.plan = CoordinatorPlan(plan, empty, record, superseded, replaced, tokens)
    job.save_id = save_id
    stale_after = job.parts.storage.stale_after
    # Noted before there is anything, so that it is stopped wherever this is interrupted.
    job.heartbeat = Heartbeat(directory, layout.marker_name(save_id), stale_after, replaced)
    directory.prepare()
    try:
        job.heartbeat.start()
    except MissingFileError:
        # The directory was empty until now, and `prune` has removed it.
        directory.prepare()
        job.heartbeat.start()


def _renamed(plan: GlobalPlan, keys: Column) -> dict[str, str]:
    """Stored names that are not simply the dotted path, by place in a rank's own keys."""
    if plan.are_names_dotted:
        return {}
    specs = plan.table.keys
    return {
        str(local): plan.names[key]
        for local, key in enumerate(keys.tolist())
        if plan.names[key] != dotted(specs[key].path)
    }


def _refuse_twin(job: SaveJob, marker: str) -> None:
    """Raise if the very same conversion is under way."""
    stale_after = job.parts.storage.stale_after
    if job.lasting_id and is_live_marker(job.directory, marker, stale_after):
        raise ConcurrentSaveError(
            f"the same conversion into {job.directory.location} is under way: {marker} is there,"
            " and its process is alive"
        )


def plan_files(job: SaveJob, layout: ExportLayout, plan: GlobalPlan) -> tuple[PlannedFile, ...]:
    """On the coordinator: the files that all ranks write into."""
    files = layout.plan_files(
        job.directory, plan.names, plan.table.keys, job.save_id, job.parts.config.fingerprint
    )
    assert job.plan is not None
    job.plan = replace(job.plan, files=tuple(files))
    return job.plan.files


def answer_to(
    plan: GlobalPlan, rank: int, save_id: str, files: Sequence[PlannedFile] | None = None
) -> bytes:
    """What the coordinator tells a rank: the save, and which chunks the rank writes.

    Args:
        files: that are planned for all ranks; ``None`` where each makes its own.
    """
    table = plan.table
    begin, end = np.searchsorted(table.owner, [rank, rank + 1])
    columns = {
        "row": plan.row[begin:end],
        "offsets": table.offsets[begin:end],
        "sizes": table.sizes[begin:end],
    }
    header = {
        "save_id": save_id,
        "renamed": _renamed(plan, plan.keys[rank]),
        "total_bytes": int(plan.bytes_by_rank[rank]),
    }
    if files is not None:
        header["files"] = [[file.part, file.size] for file in files]
        file_of, start_of = np.zeros((2, len(table.keys)), np.int64)
        for number, file in enumerate(files):
            file_of[list(file.keys)], start_of[list(file.keys)] = number, file.starts
        keys = table.key[begin:end]
        columns |= {"file": file_of[keys], "start": start_of[keys]}
    return frame(header, pack_columns(columns))
