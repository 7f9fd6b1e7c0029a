"""Agreement between ranks, over a group of its own."""

import os
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dcp_pipeline.coordination.process_group import ProcessGroupCoordination
from dcp_pipeline.coordination.single_process import SingleProcessCoordination
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import CheckpointError, CoordinationError, NotDistributedError
from tests.distributed.outcome import Died
from tests.distributed.pool import Pool
from tests.marks import slow


def coordinator(coordinator_rank: int = 0, group: Any = None, seconds: float = 30) -> Coordinator:
    coordination = ProcessGroupCoordination(timeout_seconds=seconds, poll_seconds=0.05)
    return coordination.coordinator(group, coordinator_rank=coordinator_rank)


def agree(sizes: list[int], coordinator_rank: int) -> tuple[int, bool, int]:
    """Messages of different lengths; the answer is what all have sent, and the receiver's rank."""
    here = coordinator(coordinator_rank)
    message = bytes([here.rank]) * sizes[here.rank]

    def reduce(messages: list[bytes]) -> list[bytes]:
        assert here.is_coordinator
        joined = b"".join(messages)
        return [joined + bytes([rank]) for rank in range(len(messages))]

    answer = here.exchange("test", message, reduce)
    assert answer == b"".join(bytes([r]) * n for r, n in enumerate(sizes)) + bytes([here.rank])
    said = here.broadcast("test", answer[:-1] if here.is_coordinator else None)
    assert said == answer[:-1]
    return here.rank, here.is_coordinator, here.world_size


@pytest.mark.parametrize("sizes", [[0, 0], [5, 0, 3], [1 << 20, 1, 0, 70_000], [0]], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_messages_of_any_length(ranks: Pool, sizes: list[int], last: bool) -> None:
    chosen = len(sizes) - 1 if last else 0
    found = ranks(len(sizes)).run(agree, sizes, chosen)
    assert found == [(rank, rank == chosen, len(sizes)) for rank in range(len(sizes))]


def agree_in_subgroup(members: list[int]) -> Any:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    here = coordinator(1, group)
    answer = here.exchange("test", str(dist.get_rank()).encode(), lambda all: [b"+".join(all)] * 2)
    return here.rank, here.is_coordinator, answer


@pytest.mark.parametrize("members", [[1, 3], [0, 2], [2, 3]], ids=str)
def test_ranks_are_those_of_the_group(ranks: Pool, members: list[int]) -> None:
    found = ranks(4).run(agree_in_subgroup, members)
    answer = "+".join(map(str, members)).encode()
    assert found[members[0]] == (0, False, answer) and found[members[1]] == (1, True, answer)
    assert [rank for rank in range(4) if found[rank] is None] == sorted({0, 1, 2, 3} - set(members))


def agree_in_groups_of_some() -> list[Any]:
    """Ranks that are in other numbers of groups, and have met in some of them, all meet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(count))) for count in range(2, size + 1)]
    sums = []
    for group in [group for count, group in enumerate(groups, 2) if rank < count]:
        here = coordinator(0, group)
        answer = here.exchange("test", bytes([rank]), lambda all: [b"".join(all)] * len(all))
        sums.append(list(answer))
    DeviceMesh("cpu", [0, 1])
    here = coordinator()
    answer = here.exchange("test", bytes([rank]), lambda all: [b"".join(all)] * len(all))
    return [*sums, list(answer)]


def test_ranks_that_are_in_other_numbers_of_groups(ranks: Pool) -> None:
    found = ranks(4).run(agree_in_groups_of_some)
    every = [0, 1, 2, 3]
    assert found[0] == [[0, 1], [0, 1, 2], every, every]
    assert found[3] == [every, every]


def fail_then_agree(failing: list[int], in_reduce: bool) -> tuple[str, list[int], bytes]:
    """A round that fails on all ranks; the next one is as if nothing had been."""
    here = coordinator()

    def reduce(messages: list[bytes]) -> list[bytes]:
        if in_reduce:
            raise LookupError("in reduce")
        return messages

    mine: Any = KeyError(f"of rank {here.rank}") if here.rank in failing else b"fine"
    try:
        here.exchange("first", mine, reduce)
    except CheckpointError as error:
        said, ranks_ = str(error), sorted(error.failures)  # type: ignore[attr-defined]
    return said, ranks_, here.exchange("second", b"x", lambda messages: messages)


@pytest.mark.parametrize(
    ("failing", "in_reduce", "named"),
    [([1], False, [1]), ([0, 2], False, [0, 2]), ([], True, [0]), ([2], True, [2])],
)
def test_a_failure_is_everybodys(
    ranks: Pool, failing: list[int], in_reduce: bool, named: list[int]
) -> None:
    results = ranks(3).run(fail_then_agree, failing, in_reduce)
    assert len({said for said, _, _ in results}) == 1
    for said, found, second in results:
        assert found == named and second == b"x"
        assert all(f"of rank {rank}" in said for rank in failing)


def watch_for_failure() -> tuple[bool, bool]:
    here, later = coordinator(), coordinator()
    before = here.peer_failed()
    dist.barrier()
    if here.rank == 1:
        here.report_failure(ValueError("x"))
    dist.barrier()
    seen, deadline = here.rank == 1, time.monotonic() + 10
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
        seen = here.peer_failed()
    # An operation knows of its own failures alone.
    return before, seen and not later.peer_failed()


def test_a_failure_is_seen_between_two_rounds(ranks: Pool) -> None:
    assert ranks(3).run(watch_for_failure) == [(False, True)] * 3


def end_before_the_round(rank: int) -> str:
    here = coordinator(seconds=20)
    here.exchange("first", b"")
    if here.rank == rank:
        os._exit(3)
    try:
        here.exchange("second", b"")
    except CoordinationError as error:
        return str(error)
    return "did not raise"


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_rank_that_ends_is_noticed(ranks: Pool, rank: int) -> None:
    found = ranks(2).outcomes(end_before_the_round, rank, seconds=50)
    assert isinstance(found[rank], Died) and found[rank].code == 3
    assert f"rank {rank} was lost during second" in found[1 - rank]


def count_groups() -> int:
    coordination = [ProcessGroupCoordination(timeout_seconds=30) for _ in range(3)]
    for each in coordination * 5:
        each.coordinator()
    return len(dist.distributed_c10d._world.pg_map)


def test_the_control_group_is_made_once(ranks: Pool) -> None:
    assert ranks(2).run(count_groups) == [2, 2]


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for coordination in (ProcessGroupCoordination(), SingleProcessCoordination()):
        here = coordination.coordinator()
        assert (here.rank, here.world_size, here.is_coordinator) == (0, 1, True)
        assert here.exchange("s", b"a", lambda messages: [messages[0] + b"b"]) == b"ab"
        assert here.exchange("s", b"a") == b"" and here.broadcast("s", b"x") == b"x"
        assert not here.peer_failed()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotDistributedError, match=r"WORLD_SIZE is 2.*no_dist=True"):
        ProcessGroupCoordination().coordinator()
    assert ProcessGroupCoordination().coordinator(no_dist=True).world_size == 1
