"""Nodes ``read`` and ``verify`` of the load: from files into the caller's tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_pipeline.core.errors import CorruptCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.report import CastRecord
from dcp_pipeline.pipelines.steps.load_share import ReadPlan, block_bytes, open_files
from dcp_pipeline.pipelines.steps.read_shared import SharedReads, split_reads
from dcp_pipeline.state.match import Match, take_inside
from dcp_pipeline.state.targets import ValueTarget
from dcp_pipeline.storage.reading import Read

__all__ = ["Fetched", "read", "verify"]

_VERIFY_STEP = 4 << 20


@dataclass(frozen=True)
class Fetched:
    """What was read but is not in its place yet.

    Attributes:
        assignments: path in the state to value.
        loaded: stored names of what was read.
        nbytes: read from storage.
    """

    assignments: dict[Path, Any]
    loaded: list[str]
    nbytes: int


def read(match: Match, plan: ReadPlan, manifest: Manifest, job: LoadJob) -> Fetched:
    """Read everything that the template gets; tensors are filled in place."""
    apart, shared = _shared(plan, manifest, job)
    with open_files(manifest, job) as files:
        nbytes = shared.run(files) + files.run(apart)
        job.is_verified = files.is_verified
    job.bytes_read += nbytes
    _fill(plan, job)
    for overflow in plan.casts.overflows(match.tensors):
        raise overflow
    job.casts = [
        CastRecord(target.name, target.dtype, target.target_dtype, plan.casts.count(target))
        for target in match.tensors
        if target.target_dtype is not None
    ]
    return Fetched(_assignments(match, plan.values, manifest, job), _loaded(match), nbytes)


def _fill(plan: ReadPlan, job: LoadJob) -> None:
    for constant in plan.constants:
        if job.rollback.keeper is not None and not constant.is_fresh:
            job.rollback.keeper(constant.name, constant.view)
        with torch.no_grad():
            # By way of a dtype that holds it; not every one can be filled.
            value = torch.tensor(constant.value, dtype=torch.float64, device="cpu")
            constant.view.copy_(value.to(constant.view.dtype).expand(constant.view.shape))


def verify(plan: ReadPlan, manifest: Manifest, job: LoadJob) -> Fetched:
    """Read and check everything that ``read`` is going to read, and keep none of it."""
    apart, shared = _shared(plan, manifest, job)
    reads: dict[int, list[Read]] = {}
    for part in (apart, shared.own()):
        for file, listed in part.items():
            reads.setdefault(file, []).extend(_blind(listed))
    # What has checksums of its own is verified as a whole, by every rank that needs it.
    for file, listed in plan.reads.items():
        reads.setdefault(file, []).extend(
            Read(one.offset, one.length, one.key, deliver=one.check, has_checksum=one.has_checksum)
            for one in listed
            if one.check is not None
        )
    with open_files(manifest, job) as files:
        nbytes = files.run(reads)
    job.bytes_read += nbytes
    return Fetched({}, [], nbytes)


def _shared(
    plan: ReadPlan, manifest: Manifest, job: LoadJob
) -> tuple[dict[int, list[Read]], SharedReads]:
    apart, touching = split_reads(plan.reads, plan.segments, job.coordinator.rank)
    sizes = [entry.size for entry in manifest.files]
    shared = SharedReads(touching, plan.segments, job.coordinator, block_bytes(manifest), sizes)
    return apart, shared


def _blind(reads: Sequence[Read]) -> Iterator[Read]:
    for whole in reads:
        if whole.check is not None:
            continue
        for begin in range(0, whole.length, _VERIFY_STEP):
            yield Read(whole.offset + begin, min(_VERIFY_STEP, whole.length - begin), whole.key)


def _loaded(match: Match) -> list[str]:
    return sorted({t.name for t in match.tensors} | {v.name for v in match.values})


def _assignments(
    match: Match, values: dict[int, Any], manifest: Manifest, job: LoadJob
) -> dict[Path, Any]:
    serialization = job.parts.serialization_of(manifest.serialization)
    assignments: dict[Path, Any] = dict(match.made)
    decoded: dict[int, Any] = {}
    for target in match.tensors:
        if target.path is not None and target.value is not None:
            assignments[target.path] = target.value()
    for wanted in match.values:
        if wanted.key not in decoded or not wanted.inside:
            # Decoded anew for every place, so that no two places share a list.
            decoded[wanted.key] = serialization.decode_value(values[wanted.key])
        _take(wanted, decoded[wanted.key], assignments, job)
    return assignments


def _take(target: ValueTarget, value: Any, assignments: dict[Path, Any], job: LoadJob) -> None:
    try:
        part = target.convert(take_inside(value, target.inside))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{target.name!r} was stored as one value, which has nothing at {target.inside}"
        ) from error
    if target.target is None:
        assignments[target.path] = part
        return
    if tuple(part.shape) != tuple(target.target.shape) or part.dtype != target.target.dtype:
        raise CorruptCheckpointError(
            f"{target.name!r} holds {part.dtype} {list(part.shape)} at {target.inside}, wanted is"
            f" {target.target.dtype} {list(target.target.shape)}"
        )
    job.rollback.keep(target.name, target.target)
    target.target.detach().copy_(part)
