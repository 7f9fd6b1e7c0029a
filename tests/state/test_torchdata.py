"""torchdata's ``StatefulDataLoader`` in ``RankLocal``: it goes on with the next batch."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from dcp_pipeline import AppState, RankLocal
from tests.cases.jobs import load_state, save_state
from tests.distributed.pool import Pool
from tests.marks import mostly_slow, slow

loaders = pytest.importorskip("torchdata.stateful_dataloader")

KINDS = ["torch_save", "safetensors"]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """A data set with a state of its own, which holds a tensor."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Any:
        while self.at < 50:
            self.at += 1
            yield 1000 * self.rank + self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "history": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert state["history"].tolist() == list(range(self.at))


def loader_of(kind: str, rank: int, world_size: int) -> Any:
    """A loader whose ranks are at different places of different data."""
    if kind == "stream":
        return loaders.StatefulDataLoader(Stream(rank), batch_size=3)
    if kind == "shuffled":
        generator = torch.Generator().manual_seed(5 + rank)
        return loaders.StatefulDataLoader(
            Numbers(), batch_size=3, shuffle=True, generator=generator
        )
    sampler = DistributedSampler(Numbers(), world_size, rank, shuffle=True, seed=3)
    workers = 2 if kind == "workers" else 0
    return loaders.StatefulDataLoader(
        Numbers(), batch_size=3, sampler=sampler, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )  # fmt: skip


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def app_of(data: RankLocal) -> AppState:
    torch.manual_seed(0)
    return AppState(torch.nn.Linear(2, 2), data=data)


def save_in_the_middle(path: Path, kind: str, steps: list[int], config: dict[str, Any]) -> Any:
    """Take ``steps[rank]`` batches, save; the rest of the batches."""
    rank = dist.get_rank()
    loader = loader_of(kind, rank, dist.get_world_size())
    batches = iter(loader)
    for _ in range(steps[rank]):
        next(batches)
    app = app_of(RankLocal(loader))
    save_state({"app": app}, path, config)
    return numbers_of(batches)


def go_on(path: Path, kind: str, rule: str, config: dict[str, Any]) -> Any:
    loader = loader_of(kind, dist.get_rank(), dist.get_world_size())
    app = app_of(RankLocal(loader, on_resize=rule))
    load_state({"app": app}, path, config)
    return numbers_of(loader)


@pytest.mark.parametrize(
    ("steps", "kind", "serialization"),
    mostly_slow(
        product([[2, 4], [1, 0]], ["sampler", "shuffled", "stream"], KINDS),
        [
            ([2, 4], "sampler", "torch_save"),
            ([1, 0], "shuffled", "safetensors"),
            ([2, 4], "stream", "safetensors"),
            ([1, 0], "stream", "torch_save"),
        ],
    ),
    ids=str,
)
def test_every_rank_goes_on_with_its_next_batch(
    ranks: Pool, tmp_path: Path, kind: str, steps: list[int], serialization: str
) -> None:
    config = {"serialization": serialization}
    rest = ranks(2).run(save_in_the_middle, tmp_path, kind, steps, config)
    assert rest[0] != rest[1] and all(rest)
    assert ranks(2).run(go_on, tmp_path, kind, "error", config) == rest


@pytest.mark.slow
def test_with_workers(ranks: Pool, tmp_path: Path) -> None:
    rest = ranks(2).run(save_in_the_middle, tmp_path, "workers", [2, 3], {}, seconds=120)
    assert ranks(2).run(go_on, tmp_path, "workers", "error", {}, seconds=120) == rest


@pytest.mark.parametrize(("before", "after"), [slow(4, 2), (2, 4)])
def test_t55_another_number_of_ranks(ranks: Pool, tmp_path: Path, before: int, after: int) -> None:
    ranks(before).run(save_in_the_middle, tmp_path, "stream", [1, 2, 3, 4], {})
    for error in ranks(after).fail(go_on, tmp_path, "stream", "error", {}):
        assert f"app.data: {before} ranks have saved, {after} load" in error.message
    first = ranks(after).run(go_on, tmp_path, "stream", "first", {})
    assert first == [rest_of(rank, 1) for rank in range(after)]
    fresh = ranks(after).run(go_on, tmp_path, "stream", "fresh", {})
    assert [batches[0][0] for batches in fresh] == [1000 * rank + 1 for rank in range(after)]


def rest_of(rank: int, steps: int) -> list[list[int]]:
    numbers = [1000 * rank + number for number in range(3 * steps + 1, 51)]
    return [numbers[begin : begin + 3] for begin in range(0, len(numbers), 3)]
