"""The two graphs with DCP's own objects in them: a planner, a storage writer or a reader for DCP.

They keep DCP's protocol, so what somebody wrote for ``torch.distributed.checkpoint`` works here.
Its plans and results are Python objects, which travel between ranks as pickles; our own planner's
do not. Failures travel as everywhere else, and name rank and node.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.pipelines.foreign_fit import fit_to
from dcp_pipeline.state.fitting import FittingState
from dcp_pipeline.state.flatten import is_stateful
from dcp_pipeline.state.modules import give_state, state_of
from dcp_pipeline.types.dcp import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
    WriteResult,
)

__all__ = ["ForeignJob", "expanded", "foreign_load_graph", "foreign_save_graph"]


@dataclass
class ForeignJob:
    """A save or load through DCP's protocol.

    Attributes:
        coordinator: the ranks that take part.
        planner, storage: DCP's objects.
        use_collectives: off, every rank saves on its own.
        metadata: on the coordinator, what its planner made.
    """

    coordinator: Coordinator
    planner: Any
    storage: Any
    use_collectives: bool = True
    metadata: Metadata | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def exchange(
        self, step: str, value: Any, failure: BaseException | None, reduce: Callable[..., Any]
    ) -> Any:
        """Gather a value of every rank, reduce them on the coordinator, scatter the results."""
        if not self.use_collectives:
            if failure is not None:
                raise failure
            return reduce([value])[0]

        def reduce_messages(messages: list[bytes]) -> list[bytes]:
            answers = reduce([pickle.loads(message) for message in messages])
            return [pickle.dumps(answer) for answer in answers]

        message = pickle.dumps(value) if failure is None else failure
        return pickle.loads(self.coordinator.exchange(step, message, reduce_messages))


def foreign_save_graph() -> Graph:
    """``collect -> plan -> agree -> write -> commit`` in DCP's terms."""
    return Graph(
        "save",
        [
            Node("collect", _collect, ("state",), ("collected",)),
            Node("plan", _plan_save, ("collected", "job"), ("local_plan",)),
            Node("agree", _agree_save, ("local_plan", "job"), ("share",), coordinates=True),
            Node("write", _write, ("share", "job"), ("results",)),
            Node("commit", _commit, ("results", "job"), ("metadata",), coordinates=True),
        ],
        inputs=("state", "job"),
    )


def foreign_load_graph() -> Graph:
    """``collect -> plan -> agree -> read -> settle -> apply`` in DCP's terms."""
    return Graph(
        "load",
        [
            Node("collect", _collect, ("state",), ("collected",)),
            Node("plan", _plan_load, ("collected", "job"), ("local_plan",)),
            Node("agree", _agree_load, ("local_plan", "job"), ("share",), coordinates=True),
            Node("read", _read, ("share", "job"), ("fetched",)),
            Node("settle", _settle, ("fetched", "job"), ("settled",), coordinates=True),
            Node("apply", _apply, ("state", "collected", "settled"), ("applied",)),
        ],
        inputs=("state", "job"),
    )


def _collect(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: expanded(value) for key, value in state.items()}


def expanded(value: Any) -> Any:
    """A state with ``Stateful`` objects expanded, as DCP's planners and stagers want it."""
    if is_stateful(value):
        return expanded(state_of(value))
    if type(value) is dict:
        return {key: expanded(child) for key, child in value.items()}
    return value


def _plan_save(collected: dict[str, Any], job: ForeignJob) -> SavePlan:
    planner: SavePlanner = job.planner
    writer: StorageWriter = job.storage
    is_coordinator = job.coordinator.is_coordinator
    if "storage_meta" in inspect.signature(planner.set_up_planner).parameters:
        planner.set_up_planner(
            state_dict=collected,
            storage_meta=writer.storage_meta(),
            is_coordinator=is_coordinator,
        )
    else:
        planner.set_up_planner(collected, is_coordinator)  # type: ignore[arg-type]
    _call_with_rank(writer.set_up_storage_writer, job, is_coordinator)
    return writer.prepare_local_plan(planner.create_local_plan())


def _call_with_rank(method: Callable[..., Any], job: ForeignJob, *arguments: Any) -> None:
    """Storage written for older torch does not take the rank."""
    if "kwargs" in inspect.signature(method).parameters:
        method(*arguments, rank=job.coordinator.rank, use_collectives=job.use_collectives)
    else:
        method(*arguments)


def _agree_save(
    local_plan: SavePlan | None, job: ForeignJob, failure: BaseException | None
) -> SavePlan:
    def plan(plans: list[SavePlan]) -> list[SavePlan]:
        decided, job.metadata = job.planner.create_global_plan(plans)
        result: list[SavePlan] = job.storage.prepare_global_plan(decided)
        return result

    central: SavePlan = job.exchange("agree", local_plan, failure, plan)
    return central


def _write(share: SavePlan, job: ForeignJob) -> list[WriteResult]:
    future = job.storage.write_data(job.planner.finish_plan(share), job.planner)
    future.wait()
    results: list[WriteResult] = future.value()
    return results


def _commit(
    results: list[WriteResult] | None, job: ForeignJob, failure: BaseException | None
) -> Metadata:
    def finish(all_results: list[list[WriteResult]]) -> Sequence[Metadata]:
        assert job.metadata is not None
        job.storage.finish(metadata=job.metadata, results=all_results)
        return [job.metadata] * len(all_results)

    metadata: Metadata = job.exchange("commit", results, failure, finish)
    return metadata


def _plan_load(collected: dict[str, Any], job: ForeignJob) -> LoadPlan:
    planner: LoadPlanner = job.planner
    reader: StorageReader = job.storage
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        # A checkpoint without collectives has metadata per rank only.
        if "kwargs" not in inspect.signature(reader.read_metadata).parameters:
            raise
        try:
            metadata = reader.read_metadata(rank=job.coordinator.rank)
        except FileNotFoundError:
            # There is none of either kind: what was wrong with the first is what matters.
            raise error from None
        job.use_collectives = False
    fit_to(collected, metadata)
    planner.set_up_planner(collected, metadata, job.coordinator.is_coordinator)
    _call_with_rank(reader.set_up_storage_reader, job, metadata, job.coordinator.is_coordinator)
    return reader.prepare_local_plan(planner.create_local_plan())


def _agree_load(
    local_plan: LoadPlan | None, job: ForeignJob, failure: BaseException | None
) -> LoadPlan:
    def plan(plans: list[LoadPlan]) -> list[LoadPlan]:
        decided = job.planner.create_global_plan(plans)
        result: list[LoadPlan] = job.storage.prepare_global_plan(decided)
        return result

    central: LoadPlan = job.exchange("agree", local_plan, failure, plan)
    return central


def _read(share: LoadPlan, job: ForeignJob) -> bool:
    job.storage.read_data(job.planner.finish_plan(share), job.planner).wait()
    return True


def _settle(fetched: bool | None, job: ForeignJob, failure: BaseException | None) -> bool:
    job.coordinator.exchange("settle", failure or b"")
    return True


def _apply(state: dict[str, Any], collected: dict[str, Any], settled: bool) -> bool:
    """What DCP's planner put into the expanded state, into the caller's."""
    for key, value in collected.items():
        state[key] = _applied(state[key], value)
    return True


def _applied(place: Any, value: Any) -> Any:
    if is_stateful(place):
        give_state(place, value)
        return place
    if isinstance(place, FittingState):
        # What the caller still holds is what gets the values.
        place.clear()
        place.update(value)
        return place
    if type(place) is dict and isinstance(value, dict):
        for key, child in value.items():
            place[key] = _applied(place[key], child) if key in place else child
        return place
    return value
