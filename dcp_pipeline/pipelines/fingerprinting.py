"""The fingerprint of a live state, as the manifest of a save of it would hold it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dcp_pipeline.coordination.config import ProcessGroupConfig
from dcp_pipeline.core.contributions import Contributions, fingerprints_of
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.crc64 import Words
from dcp_pipeline.core.fingerprint import Fingerprint, make_fingerprint
from dcp_pipeline.core.framing import unframe
from dcp_pipeline.core.garbage import collector_paused
from dcp_pipeline.core.packing import unpack_columns
from dcp_pipeline.core.path import dotted
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.pipelines.steps.collect import taken_apart
from dcp_pipeline.pipelines.steps.save_agree import answer_to, unpacked_plans
from dcp_pipeline.pipelines.steps.save_write import box_of, items_of, step_views
from dcp_pipeline.pipelines.together import run_together
from dcp_pipeline.pipelines.values import Share
from dcp_pipeline.planning.base import GlobalPlan
from dcp_pipeline.planning.default import DefaultPlanner
from dcp_pipeline.state.collect import collect
from dcp_pipeline.types.entries import Entries
from dcp_pipeline.types.memory import segments_of

__all__ = ["fingerprint"]


def fingerprint(
    state_dict: Any, *, process_group: Any = None, no_dist: bool = False
) -> Fingerprint:
    """The fingerprint of a state, wherever its parts lie; nothing is gathered and nothing written.

    It is the one that a save of the same state keeps in its manifest, on any number of ranks, in
    any layout. Every rank hashes a share of the bytes, replicas once, and sends 8 bytes per chunk.
    What is in a ``RankLocal`` counts under the keys of its rank, whose names hold the number of
    ranks.

    Args:
        state_dict: every rank's part of the state, as for :func:`dcp_pipeline.save`.
        process_group: the ranks that hold it, ``None`` for all.
        no_dist: this process alone.

    Returns:
        The same on every rank.

    Raises:
        CheckpointException: on every rank, if any failed: a tensor that no checkpoint can hold,
            replicas that differ, shards that do not tile their tensor.

    Example:
        >>> import torch
        >>> one = fingerprint({"weight": torch.ones(2, 2), "step": 3})
        >>> one == fingerprint({"step": 3, "weight": torch.ones(2, 2)})
        True
        >>> one.tensors["weight"], str(one) == str(fingerprint({"weight": torch.zeros(2, 2)}))
        ('eae7990166e9027e', False)
    """
    coordination = ProcessGroupConfig().build()
    try:
        coordinator = coordination.coordinator(process_group, no_dist)
        trace = Trace("fingerprint", coordinator.rank)
        job = _Job(coordinator, DefaultPlanner())
        found = run_together(_graph(), {"state": state_dict, "job": job}, coordinator, trace)
    finally:
        coordination.close()
    result: Fingerprint = found["fingerprint"]
    return result


@dataclass
class _Job:
    """One fingerprint under way; ``plan`` is the coordinator's, between its two agreements."""

    coordinator: Coordinator
    planner: DefaultPlanner
    plan: GlobalPlan | None = None


def _graph() -> Graph:
    return Graph(
        "fingerprint",
        [
            Node("collect", _collect, ("state", "job"), ("entries",)),
            Node("plan", _plan, ("entries", "job"), ("local_plan",)),
            Node("agree", _agree, ("local_plan", "job"), ("share",), coordinates=True),
            Node("hash", _hash, ("entries", "share"), ("words",)),
            Node("combine", _combine, ("words", "job"), ("fingerprint",), coordinates=True),
        ],
        inputs=("state", "job"),
    )


@collector_paused()
def _collect(state: Any, job: _Job) -> Entries:
    # Of a value only the meaning counts, and nobody has to read it back.
    flat = taken_apart(state, job.coordinator)
    return collect(flat, lambda value: (b"", value_digest(value)))


def _plan(entries: Entries, job: _Job) -> ChunkTable:
    coordinator = job.coordinator
    return job.planner.local_plan(entries, coordinator.rank, coordinator.world_size)


def _agree(local_plan: ChunkTable | None, job: _Job, failure: BaseException | None) -> Share:
    def decide(messages: list[bytes]) -> list[bytes]:
        assert local_plan is not None
        tables = unpacked_plans(messages, local_plan, job.coordinator.rank)
        job.plan = job.planner.global_plan(tables)
        return [answer_to(job.plan, rank, "") for rank in range(len(messages))]

    message: bytes | BaseException = failure or RuntimeError("there is no local plan")
    if failure is None and local_plan is not None:
        message = b"" if job.coordinator.is_coordinator else local_plan.pack()
    header, (packed,) = unframe(job.coordinator.exchange("agree", message, decide))
    assert local_plan is not None
    columns = unpack_columns(packed)
    names = tuple(dotted(spec.path) for spec in local_plan.keys)
    return Share(names, columns["row"], columns["offsets"], columns["sizes"], header["total_bytes"])


def _hash(entries: Entries, share: Share) -> Words:
    """What each chunk of the share adds to the fingerprint of its key."""
    items = list(items_of(entries, share))
    tensors = [item.data if not isinstance(item.data, bytes) else None for item in items]
    lengths = [0 if t is None else t.numel() * t.element_size() for t in tensors]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    taken = Contributions(starts, lengths, lambda row: box_of(items[row]))
    for start, tensor in zip(starts, tensors, strict=True):
        if tensor is not None:
            for segment in segments_of(tensor):
                for part in step_views(segment):
                    taken.add(start, part)
                    start += len(part)
    words, _ = taken.result()
    return words | np.asarray([item.digest for item in items], np.int64).view(np.uint64)


def _combine(words: Words | None, job: _Job, failure: BaseException | None) -> Fingerprint:
    def combine(messages: list[bytes]) -> list[bytes]:
        assert job.plan is not None
        table = job.plan.table
        numbers = fingerprints_of(table, np.frombuffer(b"".join(messages), "<u8"))
        found = make_fingerprint(job.plan.names, table.keys, numbers)
        answers = [b""] * len(messages)
        answers[job.coordinator.rank] = json.dumps(asdict(found)).encode()
        return answers

    message: bytes | BaseException = failure or RuntimeError("nothing was hashed")
    if failure is None and words is not None:
        message = words.astype("<u8").tobytes()
    coordinator = job.coordinator
    answer = coordinator.exchange("combine", message, combine)
    answer = coordinator.broadcast("combine", answer if coordinator.is_coordinator else None)
    return Fingerprint(**json.loads(answer))
