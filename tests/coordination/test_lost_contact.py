"""Who is named when a rank is gone: never the one that says so, and never one that waits itself."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from dcp_pipeline.coordination.process_group import (
    ProcessGroupCoordination,
    ProcessGroupCoordinator,
)
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import CoordinationError
from tests.distributed.outcome import Died
from tests.distributed.pool import Pool

TIMEOUT = 12.0
SPARE = 8.0
"""For a machine that is busy."""


def coordinator(timeout: float = TIMEOUT, first: int = 0) -> Coordinator:
    coordination = ProcessGroupCoordination(timeout_seconds=timeout, poll_seconds=0.05)
    here = coordination.coordinator(coordinator_rank=first)
    here.exchange("start", b"")
    return here


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("nbytes", [0, 1, 3_000_000])
def test_a_broadcast_reaches_all(ranks: Pool, size: int, nbytes: int) -> None:
    assert ranks(size).run(broadcast_from_all, nbytes) == [[True] * size] * size


def broadcast_from_all(nbytes: int) -> list[bool]:
    found = []
    for first in range(dist.get_world_size()):
        here = coordinator(30.0, first)
        data = bytes([first]) * nbytes
        found.append(here.broadcast("said", data if here.is_coordinator else None) == data)
    return found


def test_the_tree_reaches_every_rank_once() -> None:
    for size in range(1, 40):
        for first in range(0, size, 3):
            places = [place_in_tree(rank, size, first) for rank in range(size)]
            told = sorted(child for _, children in places for child in children)
            assert told == [rank for rank in range(size) if rank != first]
            for rank, (parent, _) in enumerate(places):
                assert parent is None if rank == first else rank in places[parent or 0][1]
            assert max(len(children) for _, children in places) <= size.bit_length()


def place_in_tree(rank: int, size: int, first: int) -> tuple[int | None, list[int]]:
    here = object.__new__(ProcessGroupCoordinator)
    here.rank, here.world_size, here.coordinator_rank = rank, size, first
    return here._place_in_tree()


def lose(victim: int, does: str, step: str) -> tuple[str, float]:
    """What this rank says when the victim is not in a round any more, and after how long."""
    here = coordinator()
    started = time.monotonic()
    if here.rank == victim:
        if does == "end":
            os._exit(3)
        time.sleep(TIMEOUT + SPARE)
        return "", 0.0
    try:
        rounds(here)[step]()
    except CoordinationError as error:
        return str(error), time.monotonic() - started
    return "went through", 0.0


def rounds(here: Coordinator) -> dict[str, Callable[[], Any]]:
    size = here.world_size
    after, before = (here.rank + 1) % size, (here.rank - 1) % size

    def around() -> None:
        # Only neighbours hear of one another.
        sent, received = memoryview(bytearray(9)), memoryview(bytearray(9))
        here.pass_on([(after, sent)], [(before, received)])

    return {
        "exchange": lambda: here.exchange("exchange", b"x"),
        "broadcast": lambda: here.broadcast("broadcast", b"x" if here.is_coordinator else None),
        "read": around,
    }


@pytest.mark.parametrize("does", ["end", pytest.param("wait", marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "step",
    [
        "exchange",
        pytest.param("broadcast", marks=pytest.mark.slow),
        pytest.param("read", marks=pytest.mark.slow),
    ],
)
def test_the_right_one_is_named(ranks: Pool, victim: int, does: str, step: str) -> None:
    # In the tree of 4 ranks 3 hears from 2, and all others from 0.
    found = ranks(4).outcomes(lose, victim, does, step, seconds=60)
    assert isinstance(found[victim], Died) == (does == "end")
    hears_of_it = {
        "exchange": {0, 1, 2, 3},
        "broadcast": {1, 2, 3} if victim == 0 else {3},
        "read": {(victim + 1) % 4},
    }[step] - {victim}
    for rank in set(range(4)) - {victim}:
        said, seconds = found[rank]
        assert seconds < TIMEOUT + SPARE
        if rank in hears_of_it or said != "went through":
            assert f"rank {victim} was lost during {step}" in said, (rank, said)


def come(missing: list[int]) -> str:
    coordination = ProcessGroupCoordination(timeout_seconds=3.0, poll_seconds=0.05)
    if dist.get_rank() in missing:
        time.sleep(6.0)
        return ""
    try:
        coordination.coordinator()
    except CoordinationError as error:
        return str(error)
    return "came together"


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param([0], marks=pytest.mark.slow),
        [2],
        pytest.param([1, 3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_those_that_do_not_come_are_named(ranks: Pool, missing: list[int]) -> None:
    found = ranks(4).outcomes(come, missing, seconds=60)
    named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    for rank in set(range(4)) - set(missing):
        assert found[rank].startswith(f"{named} did not come to the save or load"), found[rank]
    # A group that was not made does not stand in the way of the next one.
    assert ranks(4).run(come, []) == ["came together"] * 4


def go_on_after_one_left(rank: int) -> str:
    here = coordinator()
    if here.rank == rank:
        here.report_failure(KeyboardInterrupt())
    # The other one is through, and hears nothing of it before the next save.
    dist.barrier()
    coordinator().exchange("next", b"x")
    return "went through"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_interrupted_comes_again(ranks: Pool, rank: int) -> None:
    assert ranks(2).run(go_on_after_one_left, rank) == ["went through"] * 2


def come_after_one_left(rank: int) -> list[str]:
    """What this rank hears where another is interrupted in a turn that this one has yet to take."""
    coordinator(60.0)
    coordination = ProcessGroupCoordination(timeout_seconds=60.0, poll_seconds=0.05)
    found = []
    if dist.get_rank() == rank:
        coordination.coordinator().report_failure(KeyboardInterrupt())
        dist.barrier()
    else:
        dist.barrier()
        try:
            coordination.coordinator().exchange("late", b"x")
        except CoordinationError as error:
            found.append(str(error))
    dist.barrier()
    coordination.coordinator().exchange("next", b"x")
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_late_hears_of_an_interruption(ranks: Pool, rank: int, size: int) -> None:
    found = ranks(size).run(come_after_one_left, rank)
    said = f"rank {rank} was lost during late: it was interrupted"
    assert found == [[] if here == rank else [said] for here in range(size)]
