import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.outcome import Died, Failure
from tests.distributed.pool import CallTimeout, Pool


def sum_of_ranks(add: int) -> tuple[int, int, int]:
    total = torch.tensor([dist.get_rank() + add])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total)


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise OSError(28, "no room", "some/file")
    return "fine"


def end_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os._exit(17)
    return "fine"


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 2])
def test_every_call_has_a_group_of_its_size(ranks: Pool, size: int) -> None:
    total = sum(range(size)) + size
    assert ranks(size).run(sum_of_ranks, 1) == [(rank, size, total) for rank in range(size)]


def test_an_exception_comes_back_as_a_value(ranks: Pool) -> None:
    first, second = ranks(2).outcomes(fail_on, 1)
    assert first == "fine"
    assert isinstance(second, Failure)
    assert second.is_a("OSError") and second.errno == 28 and second.filename == "some/file"
    assert "fail_on" in second.trace
    with pytest.raises(AssertionError, match=r"rank 1(.|\n)*no room"):
        ranks(2).run(fail_on, 1)


def test_a_rank_that_ends_is_told_and_the_pool_goes_on(ranks: Pool) -> None:
    first, second = ranks(2).outcomes(end_on, 1)
    assert first == "fine"
    assert isinstance(second, Died) and second.code == 17
    assert ranks(2).run(sum_of_ranks, 0) == [(0, 2, 1), (1, 2, 1)]


def test_a_call_that_hangs_ends_and_shows_where(ranks: Pool) -> None:
    with pytest.raises(CallTimeout, match=r"ranks \[1\](.|\n)*hang_on"):
        ranks(2).run(hang_on, 1, seconds=2)
    assert ranks(1).run(sum_of_ranks, 0) == [(0, 1, 0)]
