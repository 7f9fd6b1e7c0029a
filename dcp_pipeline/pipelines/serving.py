"""What runs in a background process: it gets snapshots, and saves them with the other processes."""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.coordination.errors import error_from_record, error_to_record
from dcp_pipeline.core.path import Path
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.complete import complete
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.save import save_graph
from dcp_pipeline.staging.arena import ArenaSnapshot
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Entries, Entry, Piece
from dcp_pipeline.types.exceptions import CheckpointException

__all__ = ["Done", "Failed", "Join", "Save", "Serve", "Serving", "describe"]


@dataclass(frozen=True)
class Serve:
    """Serve a store for that many processes; the answer is its port."""

    world_size: int


@dataclass(frozen=True)
class Join:
    """Form a process group with the other processes."""

    address: str
    port: int
    rank: int
    world_size: int
    timeout_seconds: float


@dataclass
class Save:
    """Save a snapshot.

    Attributes:
        location: the checkpoint.
        is_alone: whether there are no other ranks.
        coordinator_rank, notes, empty: as in :class:`SaveJob`.
        guard: the same, pickled.
        failure: what went wrong before, as it travels between ranks.
        entries: the snapshot, see :func:`describe`; pickled.
        buffer, nbytes: number and size of the buffer that it lies in, -1 for none.
        buffers: numbers of all buffers that are still there.
    """

    location: str
    is_alone: bool
    coordinator_rank: int
    notes: dict[str, Any]
    empty: list[tuple[Path, str]]
    guard: bytes | None = None
    failure: dict[str, Any] | None = None
    entries: bytes = b""
    buffer: int = -1
    nbytes: int = 0
    buffers: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Done:
    """A save that was committed: the manifest, and what the nodes took."""

    record: bytes
    timings: list[tuple[str, float, int | None]]
    slowest_writer: tuple[int, float] | None


@dataclass(frozen=True)
class Failed:
    """A save that failed: the errors of the ranks, as they travel."""

    records: dict[int, dict[str, Any]]


class Serving:
    """Answers :class:`Serve`, :class:`Join` and :class:`Save`.

    Args:
        config, nodes: of the pipeline.
    """

    def __init__(self, config: PipelineConfig, nodes: tuple[Node, ...]) -> None:
        self._parts = Parts.build(config)
        graph = save_graph(self._parts, nodes)
        _, self._graph = graph.split("stage", {"staged", "job"}.__contains__)
        self._store: dist.TCPStore | None = None
        self._mapped: dict[int, torch.Tensor] = {}

    def __call__(self, request: Serve | Join | Save, descriptor: int) -> Any:
        if isinstance(request, Serve):
            return self._serve(request)
        if isinstance(request, Join):
            return self._join(request)
        return self._save(request, descriptor)

    def _serve(self, request: Serve) -> int:
        self._store = dist.TCPStore(
            "localhost", 0, request.world_size, is_master=True, wait_for_workers=False
        )
        return self._store.port

    def _join(self, request: Join) -> None:
        timeout = timedelta(seconds=request.timeout_seconds)
        store = self._store or dist.TCPStore(
            request.address, request.port, request.world_size, is_master=False, timeout=timeout
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=request.rank,
            world_size=request.world_size,
            timeout=timeout,
        )

    def _save(self, request: Save, descriptor: int) -> Done | Failed:
        failure = None if request.failure is None else error_from_record(request.failure)[0]
        staged, guard = Entries(), None
        try:
            staged = self._attach(request, descriptor)
            guard = None if request.guard is None else pickle.loads(request.guard)
        except Exception as error:
            # The other processes have to hear of it.
            failure = failure or error
        coordinator = self._parts.coordination.coordinator(
            None, request.is_alone, request.coordinator_rank
        )
        directory = self._parts.storage.open(request.location)
        job = SaveJob(self._parts, coordinator, directory, request.notes, empty=request.empty)
        job.guard = guard
        trace = Trace("save", coordinator.rank)
        inputs = {"staged": staged, "job": job}
        try:
            saved = complete(self._graph, inputs, job, trace, failure)
        except CheckpointException as error:
            return Failed({rank: error_to_record(e) for rank, (e, _) in error.failures.items()})
        timings = [(timing.node, timing.seconds, timing.nbytes) for timing in trace.timings]
        return Done(saved.manifest.encode(), timings, trace.slowest_writer)

    def _attach(self, request: Save, descriptor: int) -> Entries:
        """The snapshot over this process's mapping of its buffer."""
        for number in self._mapped.keys() - request.buffers:
            del self._mapped[number]
        if descriptor >= 0:
            try:
                mapping = mmap.mmap(descriptor, request.nbytes)
            finally:
                os.close(descriptor)
            self._mapped[request.buffer] = torch.frombuffer(mapping, dtype=torch.uint8)
        if request.buffer < 0:
            return Entries()
        return _attached(pickle.loads(request.entries), self._mapped[request.buffer])

    def close(self) -> None:
        """Give back the storage; the group goes with the process."""
        self._parts.close()


def describe(snapshot: ArenaSnapshot) -> list[tuple[Any, ...]]:
    """The entries of a snapshot with positions in its buffer in place of tensors."""
    positions = iter(snapshot.positions)

    def places(entry: Entry) -> list[tuple[Any, ...]]:
        if entry.alias >= 0:
            return []
        return [(piece.offsets, piece.sizes, next(positions)) for piece in entry.pieces]

    return [
        (
            entry.path, entry.kind, entry.dtype, entry.shape, places(entry), entry.payload,
            entry.may_repeat, entry.digest, entry.alias,
        )
        for entry in snapshot
    ]  # fmt: skip


def _attached(described: list[tuple[Any, ...]], buffer: torch.Tensor) -> Entries:
    """The inverse of :func:`describe`, over a mapping of the same buffer."""
    entries = Entries()
    for path, kind, dtype, shape, places, payload, may_repeat, digest, alias in described:
        pieces = entries[alias].pieces if alias >= 0 else tuple(
            Piece(offsets, sizes, _tensor_at(buffer, position, DTYPES[dtype], sizes))
            for offsets, sizes, position in places
        )  # fmt: skip
        entries.append(Entry(path, kind, dtype, shape, pieces, payload, may_repeat, digest, alias))
    return entries


def _tensor_at(
    buffer: torch.Tensor, position: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> torch.Tensor:
    nbytes = dtype.itemsize * torch.Size(sizes).numel()
    return buffer[position : position + nbytes].view(dtype).view(sizes)
