"""State of single ranks: T53, T54, T55, and the kind behind them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline import RankLocal, RngState
from tests.cases.jobs import load_state, pipeline_of, save_state
from tests.cases.rank_locals import KINDS, Loader, draw, loader_of, scramble
from tests.distributed.pool import Pool
from tests.marks import mostly_slow, slow

# T53, T54: without it.


def save_differing(path: Path, kind: str) -> None:
    rank = dist.get_rank()
    differing = {
        "tensors": torch.full((2,), float(rank)),
        "values": {"at": rank},
        "shapes": torch.ones(rank + 1),
        "dtypes": torch.ones(1, dtype=[torch.float32, torch.float16][rank]),
        "kinds": [torch.ones(1), 3][rank],
        "structures": [{"x": 1}, 3][rank],
        "empty": [{}, 3][rank],
    }
    save_state({"own": differing[kind]}, path)


@pytest.mark.parametrize(
    "kind", ["tensors", "values", "shapes", "dtypes", "kinds", "structures", "empty"]
)
def test_t53_t54_what_differs_and_is_not_declared(ranks: Pool, tmp_path: Path, kind: str) -> None:
    for error in ranks(2).fail(save_differing, tmp_path, kind):
        assert error.is_a("StateError")
        assert "'own" in error.message or " own" in error.message
        assert "RankLocal" in error.message
        if kind != "empty":
            assert "rank 1" in error.message or "ranks [1]" in error.message
    assert not list(tmp_path.glob("*.json"))


def save_loader(path: Path, config: dict[str, Any]) -> int:
    """Every rank is at another place; rank 0 has not begun, and its state says nothing."""
    rank = dist.get_rank()
    loader = loader_of(rank, 2 * rank)
    save_state({"train": {"data": RankLocal(loader)}, "step": 7}, path, config)
    return loader.step()


def load_loader(path: Path, rule: str, config: dict[str, Any]) -> int:
    loader = loader_of(dist.get_rank() + 10, 1)
    load_state({"train": {"data": RankLocal(loader, on_resize=rule)}, "step": 0}, path, config)
    return loader.step()


RESIZED = [(4, 2), (2, 4), (4, 4), (2, 1), (3, 3)]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    mostly_slow(
        [(*sizes, kind) for sizes in RESIZED for kind in KINDS],
        [(4, 2, "safetensors"), (2, 4, "torch_save"), (3, 3, "safetensors")],
    ),
)
def test_t55_positions_of_data_loaders(
    ranks: Pool, tmp_path: Path, before: int, after: int, kind: str
) -> None:
    config = {"serialization": kind}
    expected = ranks(before).run(save_loader, tmp_path, config)
    if before == after:
        found = ranks(after).run(load_loader, tmp_path, "error", config)
        assert found[1:] == expected[1:] and found[0] == 10001
        return
    for error in ranks(after).fail(load_loader, tmp_path, "error", config):
        assert f"train.data: {before} ranks have saved, {after} load" in error.message
    fresh = ranks(after).run(load_loader, tmp_path, "fresh", config)
    assert fresh == [1000 * (rank + 10) + 2 for rank in range(after)]
    first = ranks(after).run(load_loader, tmp_path, "first", config)
    # That of rank 0 was at its start, and its state said nothing.
    assert first == [1000 * (rank + 10) + 1 for rank in range(after)]


# The kind behind them.


def save_mixed(path: Path) -> None:
    rank = dist.get_rank()
    values = [torch.ones(2, 3), torch.arange(5, dtype=torch.int8), {"a": [1, {}]}, None]
    save_state({"own": RankLocal(values[rank]), "w": torch.ones(3)}, path)


def load_mixed(path: Path) -> str:
    own = RankLocal({"whatever": torch.zeros(1)})
    load_state({"own": own, "w": torch.zeros(3)}, path)
    return repr(own.value)


def test_values_of_different_kinds(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_mixed, tmp_path)
    assert ranks(4).run(load_mixed, tmp_path) == [
        repr(torch.ones(2, 3)),
        repr(torch.arange(5, dtype=torch.int8)),
        "{'a': [1, {}]}",
        "None",
    ]
    found = dcp_pipeline.load_keys(tmp_path)["own"]
    assert sorted(found) == [f"rank-{rank}-of-4" for rank in range(4)]
    # One rank alone looks at another one's.
    state: dict[str, Any] = {"own": {"rank-1-of-4": torch.zeros(5, dtype=torch.int8)}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert state["own"]["rank-1-of-4"].tolist() == [0, 1, 2, 3, 4]
    assert dcp_pipeline.verify(tmp_path).is_well


def save_where_it_shares_memory(path: Path) -> None:
    weight = torch.full((4,), float(dist.get_rank()))
    config = {"planner": {"kind": "default", "check_replicas": False}}
    save_state({"w": weight, "own": RankLocal(weight)}, path, config)


def load_shared(path: Path) -> list[float]:
    own = RankLocal(None)
    load_state({"w": torch.zeros(4), "own": own}, path)
    return own.value.tolist()


def test_memory_that_is_in_the_state_elsewhere_too(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_where_it_shares_memory, tmp_path)
    assert ranks(2).run(load_shared, tmp_path) == [[0.0] * 4, [1.0] * 4]


def save_on_some(path: Path) -> None:
    rank = dist.get_rank()
    state = {"w": torch.ones(2)} | ({"own": RankLocal(rank)} if rank in (1, 2) else {})
    save_state(state, path)


def load_on(path: Path, holders: list[int], rule: str = "error") -> Any:
    own = RankLocal(None, on_resize=rule)
    state = {"w": torch.zeros(2)} | ({"own": own} if dist.get_rank() in holders else {})
    load_state(state, path)
    return own.value


def test_a_value_that_only_some_ranks_have(ranks: Pool, tmp_path: Path) -> None:
    ranks(3).run(save_on_some, tmp_path)
    assert ranks(3).run(load_on, tmp_path, [1, 2]) == [None, 1, 2]
    assert ranks(3).run(load_on, tmp_path, [2]) == [None, None, 2]
    for error in ranks(3).fail(load_on, tmp_path, [0, 1, 2]):
        assert "own.rank-0-of-3 (this rank has saved no value)" in error.message
    assert ranks(2).run(load_on, tmp_path, [0, 1], "first") == [1, 1]
    for error in ranks(2).fail(load_on, tmp_path, [1]):
        assert "own: 3 ranks have saved, 2 load" in error.message


def save_in_groups(path: Path) -> None:
    """Two groups of two, each to a checkpoint of its own; ranks count within the group."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    with pipeline_of() as pipeline:
        state = {"own": RankLocal(f"of {rank}")}
        pipeline.save(state, path / str(rank % 2), process_group=groups[rank % 2])


def load_in_groups(path: Path) -> Any:
    """Each group takes the other one's."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank, own = dist.get_rank(), RankLocal(None)
    with pipeline_of() as pipeline:
        other = path / str(1 - rank % 2)
        pipeline.load({"own": own}, other, process_group=groups[rank % 2])
    return own.value


def test_ranks_count_within_the_group(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_in_groups, tmp_path)
    found = dcp_pipeline.load_keys(tmp_path / "1")["own"]
    assert found == {"rank-0-of-2": "of 1", "rank-1-of-2": "of 3"}
    assert ranks(4).run(load_in_groups, tmp_path) == ["of 1", "of 0", "of 3", "of 2"]
    assert ranks(2).run(load_on_own, tmp_path / "0") == ["of 0", "of 2"]


def load_on_own(path: Path) -> Any:
    own = RankLocal(None)
    load_state({"own": own}, path)
    return own.value


def save_alone(path: Path) -> Any:
    rank, own = dist.get_rank(), RankLocal(None)
    with pipeline_of() as pipeline:
        pipeline.save({"own": RankLocal(rank)}, path / str(rank), no_dist=True)
        pipeline.load({"own": own}, path / str(rank), no_dist=True)
    return own.value


def test_ranks_that_save_alone(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(save_alone, tmp_path) == [0, 1]
    assert dcp_pipeline.load_keys(tmp_path / "1") == {"own": {"rank-0-of-1": 1}}


class FailsOn:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == self.rank:
            raise RuntimeError("not today")


def save_before_failure(path: Path) -> None:
    loader = loader_of(dist.get_rank(), 5)
    own = RankLocal({"loader": loader, "t": torch.ones(2)})
    save_state({"own": own, "rng": RankLocal(RngState()), "bad": FailsOn(-1)}, path)


def fail_to_load(path: Path, rank: int) -> list[Any]:
    scramble(dist.get_rank())
    wanted = draw()
    scramble(dist.get_rank())
    loader, tensor = loader_of(dist.get_rank() + 10, 1), torch.zeros(2)
    value = {"loader": loader, "t": tensor, "kept": 1}
    own = RankLocal(value)
    with pytest.raises(RuntimeError, match="not today"):
        load_state({"own": own, "rng": RankLocal(RngState()), "bad": FailsOn(rank)}, path)
    assert own.value is value and list(value) == ["loader", "t", "kept"]
    assert tensor.tolist() == [0, 0] and value["t"] is tensor
    assert draw() == wanted
    return [loader.start, loader.seen]


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_failure_on_one_rank_puts_all_back(ranks: Pool, tmp_path: Path, rank: int) -> None:
    ranks(2).run(save_before_failure, tmp_path)
    assert ranks(2).run(fail_to_load, tmp_path, rank) == [[10000, 1], [11000, 1]]


def save_by_dcp(path: Path) -> None:
    dcp.save({"own": RankLocal(loader_of(dist.get_rank(), 4))}, checkpoint_id=path)


def load_by_dcp(path: Path) -> int:
    loader = loader_of(dist.get_rank() + 10, 4)
    dcp.load({"own": RankLocal(loader)}, checkpoint_id=path)
    return loader.step()


def save_by_us(path: Path) -> None:
    save_state({"own": RankLocal(loader_of(dist.get_rank(), 4))}, path)


def load_by_us(path: Path) -> int:
    loader = Loader(0)
    load_state({"own": RankLocal(loader)}, path)
    return loader.step()


@pytest.mark.filterwarnings("ignore")
def test_plain_dcp_both_ways(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_by_dcp, tmp_path / "theirs")
    assert ranks(2).run(load_by_us, tmp_path / "theirs") == [5, 1005]
    ranks(2).run(save_by_us, tmp_path / "ours")
    assert ranks(2).run(load_by_dcp, tmp_path / "ours") == [5, 1005]
