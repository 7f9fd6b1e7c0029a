"""Whole states and shards, both ways, on real ranks; and no more memory than is said."""

import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_pipeline import AppState, load, save
from dcp_pipeline.core.errors import CheckpointError, ShapeMismatchError
from dcp_pipeline.state.helpers import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from tests.distributed.pool import Pool
from tests.parallelism.layouts import build

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        whole = state.full_tensor() if isinstance(state, DTensor) else state
        return whole.tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state


def through_whole_states(name: str, is_flat: bool) -> list[str]:
    """Whole on rank 0, from there into fresh jobs; what differs."""
    problems = []
    job = build(name)
    job.train(0, 2)
    expected = plain(get_state_dict(job.model, job.optimizer))
    on_first = StateDictOptions(
        full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=is_flat
    )
    weights, state = get_state_dict(job.model, job.optimizer, options=on_first)
    if dist.get_rank() and (weights or state):
        problems.append("another rank than the first has the state")
    everywhere = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=is_flat)
    both = {
        "sent": (FROM_FIRST, (weights, state)),
        "cut": (FULL, get_state_dict(job.model, job.optimizer, options=everywhere)),
    }
    for how, (options, (model_state, optimizer_state)) in both.items():
        fresh = build(name, lr=1.0)
        fresh.train(5, 6)
        set_state_dict(
            fresh.model,
            fresh.optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=options,
        )
        if plain(get_state_dict(fresh.model, fresh.optimizer)) != expected:
            problems.append(f"{how}: other values")
    return problems


@pytest.mark.parametrize(
    ("name", "size", "is_flat"),
    [
        ("fsdp2", 3, True),
        ("fsdp2 over tensor", 4, False),
        ("ddp", 2, False),
        ("experts", 2, True),
        pytest.param("fsdp2", 3, False, marks=pytest.mark.slow),
        pytest.param("fsdp2 over tensor", 4, True, marks=pytest.mark.slow),
        pytest.param("ddp", 2, True, marks=pytest.mark.slow),
        pytest.param("experts", 2, False, marks=pytest.mark.slow),
    ],
)
def test_whole_states_both_ways(ranks: Pool, name: str, size: int, is_flat: bool) -> None:
    assert ranks(size).run(through_whole_states, name, is_flat) == [[]] * size


def fill_without_a_warning(path: Path) -> bool:
    """Sending from rank 0, and giving memory to what has none, warn of nothing."""
    job = build("fsdp2")
    state = get_model_state_dict(job.model, options=ON_FIRST)
    save({"weight": torch.ones(2)}, checkpoint_id=path)
    empty = {"weight": torch.empty(2, device="meta")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_model_state_dict(job.model, state, options=FROM_FIRST)
        load(empty, checkpoint_id=path)
    return bool(empty["weight"].eq(1).all())


def test_nothing_is_warned_of(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(fill_without_a_warning, tmp_path) == [True, True]


def send_a_wrong_shape() -> str:
    job = build("fsdp2")
    state = get_model_state_dict(job.model, options=ON_FIRST)
    if dist.get_rank() == 0:
        state["head.bias"] = torch.zeros(9)
    try:
        set_model_state_dict(job.model, state, options=FROM_FIRST)
    except ShapeMismatchError as error:
        return str(error)
    return "went through"


def test_a_wrong_shape_is_named_on_all_ranks(ranks: Pool) -> None:
    assert ranks(2).run(send_a_wrong_shape) == ["head.bias: [9] given, [7] wanted"] * 2


class Rows(torch.optim.Optimizer):
    """Keeps a number per row of a matrix."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            size = parameter.grad.abs()
            rows = size.sum(1) if size.dim() > 1 else size
            state["rows"] = state["rows"] + rows if state else rows
            scale = state["rows"][:, None] if size.dim() > 1 else state["rows"]
            parameter.sub_(0.1 * parameter.grad / (1 + scale))


def odd_optimizers(path: Path) -> list[str]:
    """Optimizers whose state is not of the shape of the parameter, over shards."""
    problems = []
    kinds = {
        "rows": Rows,
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "capturable": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    }
    for kind, make in kinds.items():

        def job(seed: int, make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
            return model, make(model.parameters())

        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        model, optimizer = job(0)
        train(model, optimizer)
        save(AppState(model, optimizer), checkpoint_id=path / kind)
        other, fresh = job(1)
        load(AppState(other, fresh), checkpoint_id=path / kind)
        found = plain(get_state_dict(other, fresh)), plain(get_state_dict(model, optimizer))
        if found[0] != found[1]:
            problems.append(f"{kind}: other values")
        train(model, optimizer)
        train(other, fresh)
        if plain(get_model_state_dict(other)) != plain(get_model_state_dict(model)):
            problems.append(f"{kind}: another step")
    return problems


def test_optimizers_with_state_of_other_shapes(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(odd_optimizers, tmp_path) == [[], []]


class Refuses:
    def __init__(self, rank: int) -> None:
        self.refuses = dist.get_rank() == rank

    def state_dict(self) -> dict[str, int]:
        return {"one": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if self.refuses:
            self.refuses = False
            raise RuntimeError("not me")


def refuse(path: Path, name: str, steps: int) -> list[str]:
    """A load that fails in an object's ``load_state_dict`` on one rank; what it has changed."""
    problems = []
    job = build(name)
    job.train(0, 1)
    save(
        {"app": AppState(job.model, job.optimizer), "other": Refuses(-1)}, checkpoint_id=path / "c"
    )
    for rank in range(dist.get_world_size()):
        fresh = build(name, lr=0.7)
        fresh.train(9, 9 + steps)
        before = plain(get_state_dict(fresh.model, fresh.optimizer))
        try:
            app = AppState(fresh.model, fresh.optimizer)
            load({"other": Refuses(rank), "app": app}, checkpoint_id=path / "c")
            problems.append(f"{rank}: went through")
        except CheckpointError as error:
            if "not me" not in str(error):
                problems.append(f"{rank}: {error}")
        if plain(get_state_dict(fresh.model, fresh.optimizer)) != before:
            problems.append(f"{rank}: changed")
    return problems


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["fsdp2", "ddp"])
def test_a_load_that_an_object_refuses_leaves_everything(
    ranks: Pool, tmp_path: Path, name: str, steps: int
) -> None:
    assert ranks(2).run(refuse, tmp_path, name, steps) == [[], []]


MIB = 1 << 20
PARTS, PART = 16, 32 * MIB // 4
"""512 MiB in tensors of 32 MiB."""


def big_model(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(*[nn.Linear(PART // 1024, 1024, bias=False) for _ in range(PARTS)])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Peak:
    """Bytes by which this process grows while the block runs, at most."""

    def __enter__(self) -> "Peak":
        self.first = self.most = _resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.is_set():
            self.most = max(self.most, _resident())
            time.sleep(0.002)

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        return (self.most - self.first) / MIB


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(path: Path) -> dict[str, float]:
    """MiB that each way takes beyond what this rank has already."""
    model = big_model()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0)
    found = {}
    with Peak() as peak:
        state = get_model_state_dict(model)
    found["sharded"] = peak.mib
    with Peak() as peak:
        save({"model": state}, checkpoint_id=path / "c")
    found["save"] = peak.mib
    with Peak() as peak:
        whole = get_model_state_dict(model, options=ON_FIRST)
    found["to rank 0"] = peak.mib
    with Peak() as peak:
        set_model_state_dict(model, whole, options=FROM_FIRST)
    found["from rank 0"] = peak.mib
    del whole, state, model
    empty = big_model("meta")
    with Peak() as peak:
        load(AppState(empty), checkpoint_id=path / "c")
    found["onto meta"] = peak.mib
    return found


@pytest.mark.slow
def test_nobody_holds_more_than_a_tensor_beyond_its_share(ranks: Pool, tmp_path: Path) -> None:
    first, other = ranks(2).run(measure, tmp_path, seconds=200.0)
    tensor, share, whole, spare = 32.0, 256.0, 512.0, 48.0
    for found in (first, other):
        assert found["sharded"] < spare
        assert found["save"] < spare + tensor
        assert found["from rank 0"] < 2 * tensor + spare
        assert found["onto meta"] < share + tensor + spare
    assert first["to rank 0"] < whole + 2 * tensor + spare
    assert other["to rank 0"] < spare


def optimizer_of_no_model() -> list[str]:
    model = fully_shard(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    found = get_optimizer_state_dict(model, optimizer)
    return sorted(found["state"])


def test_names_on_ranks(ranks: Pool) -> None:
    assert ranks(2).run(optimizer_of_no_model) == [["bias", "weight"]] * 2
