"""Nodes of a conversion into one file for ``torch.load``, which the coordinator writes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from dcp_pipeline.core.crc64 import finished, raw_crc64
from dcp_pipeline.core.errors import UnsupportedLeafError, list_some
from dcp_pipeline.core.fingerprint import make_fingerprint
from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import assign_names
from dcp_pipeline.formats.torch_archive import ArchivedTensor, TorchArchive
from dcp_pipeline.formats.torch_values import loads_weights_only
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.layout.export import PlannedFile, part_name
from dcp_pipeline.layout.torch_file import TorchFileLayout
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.steps.export_commit import exported
from dcp_pipeline.pipelines.steps.save_agree import same_everywhere, start_save
from dcp_pipeline.pipelines.steps.save_commit import publish_export, versions
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Entries
from dcp_pipeline.types.memory import segments_of

__all__ = ["commit_torch_file", "write_torch_file"]


def write_torch_file(staged: Entries, job: SaveJob) -> Manifest | None:
    """On the coordinator: write the file, under another name; durable when this returns.

    Raises:
        UnsupportedLeafError: values that ``torch.load(weights_only=True)`` would refuse, and
            tensors that ``torch.save`` cannot hold.
    """
    if not job.coordinator.is_coordinator:
        return None
    layout = job.parts.layout
    assert isinstance(layout, TorchFileLayout)
    names = assign_names(entry.path for entry in staged)
    state, sources = _state(staged, names, job)
    archive = TorchArchive(state)
    start_save(job)
    part = part_name(layout.name, job.save_id)
    # Of each storage; the values have theirs already.
    words = [0] * len(sources)

    def elements(number: int) -> Iterator[memoryview]:
        entry, raw = staged[sources[number]], 0
        for piece in entry.pieces:
            for view in segments_of(piece.data):
                raw = raw_crc64(view, raw)
                yield view
        nbytes = prod(entry.shape) * DTYPES[str(entry.dtype)].itemsize
        words[number] = finished(raw, nbytes)

    job.written.append(part)
    job.directory.write(
        part, archive.size, archive.segments(elements), lambda data: job.check_peers(), 1
    )
    job.directory.sync()
    numbers = [
        words[held.storage] if type(held) is ArchivedTensor else value_digest(held) % (1 << 64)
        for held in state.values()
    ]
    specs = [entry.spec for entry in staged]
    file = PlannedFile(part, layout.name, archive.size, tuple(sources), tuple(archive.starts))
    assert job.plan is not None
    job.plan = replace(job.plan, files=(file,))
    # Values are in the pickle, and have no place of their own.
    manifest = exported(names, specs, job, versions())
    return replace(manifest, fingerprint=make_fingerprint(names, specs, numbers))


def commit_torch_file(
    written: Manifest | None, job: SaveJob, failure: BaseException | None
) -> Manifest:
    """All ranks hear whether the file was written; the coordinator gives it its name.

    Raises:
        DisagreementError: the ranks do not convert the same.
    """
    layout = job.parts.layout
    assert isinstance(layout, TorchFileLayout)
    target = f"{job.directory.location}/{layout.name}"
    header = {"checkpoint_id": target, "config": job.parts.config.digest()}
    message = frame(header) if failure is None else failure
    answer = job.coordinator.exchange(
        "commit", message, lambda messages: _publish(messages, written, job)
    )
    return Manifest.decode(answer) if job.committed is None else job.committed


def _publish(messages: list[bytes], manifest: Manifest | None, job: SaveJob) -> list[bytes]:
    same_everywhere([unframe(message)[0] for message in messages])
    layout = job.parts.layout
    assert isinstance(layout, TorchFileLayout) and manifest is not None
    parts = {layout.name: part_name(layout.name, job.save_id)}
    return [publish_export(job, layout, manifest, parts)] * len(messages)


def _state(
    staged: Entries, names: list[str], job: SaveJob
) -> tuple[dict[str, ArchivedTensor | Any], list[int]]:
    """What the file holds, and which entry each of its storages is made of."""
    state: dict[str, ArchivedTensor | Any] = {}
    sources: list[int] = []
    storages: dict[int, int] = {}
    refused = []
    for position, (entry, name) in enumerate(zip(staged, names, strict=True)):
        if entry.dtype is None:
            state[name] = job.parts.serialization.decode_value(entry.payload)
            if not loads_weights_only(state[name]):
                refused.append(f"{name!r}, a {type(state[name]).__name__}")
            continue
        source = entry.alias if entry.alias >= 0 else position
        if source not in storages:
            storages[source] = len(sources)
            sources.append(source)
        state[name] = ArchivedTensor(DTYPES[entry.dtype], entry.shape, storages[source])
    if refused:
        raise UnsupportedLeafError(
            f"torch.load(weights_only=True) would refuse {len(refused)} values:"
            f" {list_some(refused)}; leave them out (drop)"
        )
    return state, sources
