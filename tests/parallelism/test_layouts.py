"""Saved on one layout, loaded on the others; and a resume on the same is exact."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_pipeline import (
    AppState,
    CheckpointError,
    RankLocal,
    ReplicaMismatchError,
    RngState,
    load,
    save,
)
from dcp_pipeline.state.helpers import StateDictOptions, get_state_dict
from tests.distributed.pool import Pool
from tests.marks import slow
from tests.parallelism.layouts import LAYOUTS, Feed, Job, build

FULL = StateDictOptions(full_state_dict=True)


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def app_of(job: Job, name: str) -> AppState:
    """Stages have different groups, which only the flat layout holds."""
    options = FLAT if name == "pipeline" else None
    return AppState(job.model, job.optimizer, options=options, scheduler=job.scheduler)


def whole(job: Job) -> dict[str, Any]:
    """Name to values of everything, without shards."""
    weights, state = get_state_dict(job.model, job.optimizer, options=FULL)
    found: dict[str, Any] = {name: value.tolist() for name, value in weights.items()}
    for name, values in state["state"].items():
        for key, value in values.items():
            found[f"{name}/{key}"] = torch.as_tensor(value).tolist()
    return found


def train_and_save(path: Path, name: str) -> tuple[dict[str, Any], list[float | None]]:
    job = build(name)
    job.train(0, 3)
    save(app_of(job, name), checkpoint_id=path / name)
    return whole(job), job.train(3, 6)


def resume(path: Path, name: str, saved_as: str) -> tuple[dict[str, Any], list[float | None]]:
    job = build(name, lr=1.0)
    load(app_of(job, name), checkpoint_id=path / saved_as)
    return whole(job), job.train(3, 6)


OWN_MASKS = {"ddp", "compiled ddp", "fsdp2", "hsdp", "pipeline", "fsdp1"}
"""Where ranks drop what they like; on other layouts some of them compute the same."""


class Loader:
    """Numbers of batches, shuffled anew in every epoch by a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.left: list[int] = []

    def next(self) -> int:
        if not self.left:
            self.left = torch.randperm(5, generator=self.generator).tolist()
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "left": list(self.left)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])
        self.left = list(state_dict["left"])


class Run:
    """A job that draws: masks of its dropout, batches, and numbers of every kind."""

    def __init__(self, name: str, lr: float, seed: int) -> None:
        self.job, self.loader, self._name = build(name, lr=lr), Loader(seed), name
        for module in self.job.model.modules():
            if isinstance(module, Feed):
                module.register_forward_hook(lambda _, args, out: nn.functional.dropout(out, 0.2))
        mine = seed + (dist.get_rank() if name in OWN_MASKS else 0)
        torch.manual_seed(mine)
        np.random.seed(mine)
        random.seed(mine)

    def state(self) -> dict[str, Any]:
        return {
            "app": app_of(self.job, self._name),
            "rng": RankLocal(RngState()),
            "data": RankLocal(self.loader),
        }

    def train(self, steps: int) -> list[Any]:
        return [
            (random.random(), float(np.random.rand()), self.job.step(self.loader.next()))
            for _ in range(steps)
        ]


def train_unbroken_and_resume(path: Path, name: str) -> list[str]:
    """What differs between an unbroken run and one that was resumed, also before the first step."""
    problems = []
    for before in (0, 3):
        unbroken = Run(name, 0.05, seed=1)
        course = unbroken.train(before + 3)[before:]
        broken = Run(name, 0.05, seed=1)
        broken.train(before)
        save(broken.state(), checkpoint_id=path / f"{name} {before}")
        resumed = Run(name, 1.0, seed=8)
        resumed.train(2)
        load(resumed.state(), checkpoint_id=path / f"{name} {before}")
        if resumed.train(3) != course:
            problems.append(f"{before}: another course")
        if whole(resumed.job) != whole(unbroken.job):
            problems.append(f"{before}: other values")
        if resumed.job.scheduler.state_dict() != unbroken.job.scheduler.state_dict():
            problems.append(f"{before}: another schedule")
    dist.barrier()
    return problems


def merged(found: list[tuple[dict[str, Any], list[float | None]]]) -> tuple[Any, list[float]]:
    """What all ranks have together; stages have different names."""
    values: dict[str, Any] = {}
    for mine, _ in found:
        for name, value in mine.items():
            assert values.setdefault(name, value) == value, name
    losses = [losses for _, losses in found if None not in losses]
    return values, losses[-1]  # type: ignore[return-value]


def pairs() -> list[Any]:
    """Every layout is saved on once and loaded on once in the default run."""
    names = [name for name, layout in LAYOUTS.items() if not layout.has_experts]
    found = []
    for place, saved in enumerate(names):
        for other, loaded in enumerate(names):
            distance = (other - place) % len(names)
            marks = [] if distance == 3 else [pytest.mark.slow]
            if distance:
                found.append(pytest.param(saved, loaded, marks=marks, id=f"{saved} to {loaded}"))
    found += [
        pytest.param("experts", "experts alone", id="experts to alone"),
        pytest.param("experts alone", "experts", id="alone to experts"),
    ]
    return found


@pytest.mark.parametrize(("saved", "loaded"), pairs())
def test_from_one_layout_to_another(ranks: Pool, tmp_path: Path, saved: str, loaded: str) -> None:
    before = merged(ranks(LAYOUTS[saved].sizes[0]).run(train_and_save, tmp_path, saved))
    after = merged(ranks(LAYOUTS[loaded].sizes[0]).run(resume, tmp_path, loaded, saved))
    assert after[0] == before[0]
    # The order of additions differs between layouts.
    assert after[1] == pytest.approx(before[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if len(layout.sizes) > 1])
def test_from_one_number_of_ranks_to_another(ranks: Pool, tmp_path: Path, name: str) -> None:
    for size in LAYOUTS[name].sizes:
        before = merged(ranks(size).run(train_and_save, tmp_path, name))
        for other in LAYOUTS[name].sizes:
            after = merged(ranks(other).run(resume, tmp_path, name, name))
            assert after[0] == before[0]
            assert after[1] == pytest.approx(before[1], rel=1e-4)


LESS_OFTEN = ("hsdp", "context", "tensor", "sequence", "ddp")


@pytest.mark.parametrize("name", [slow(name) if name in LESS_OFTEN else name for name in LAYOUTS])
def test_t38_a_resume_is_exact(ranks: Pool, tmp_path: Path, name: str) -> None:
    size = LAYOUTS[name].sizes[0]
    assert ranks(size).run(train_unbroken_and_resume, tmp_path, name) == [[]] * size


class Refuses:
    """Does not take its state on the last rank."""

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no")


def fail_while_applying(path: Path, name: str, is_first: bool) -> list[str]:
    """What a load has left changed that fails on one rank, before or after the others."""
    problems = []
    job = build(name)
    job.train(0, 2)

    def state(job: Job) -> dict[str, Any]:
        parts = {"app": app_of(job, name), "rng": RankLocal(RngState())}
        return {"bad": Refuses()} | parts if is_first else parts | {"bad": Refuses()}

    save(state(job), checkpoint_id=path / "c")
    for steps in (0, 2):
        other, same = build(name, lr=0.9), build(name, lr=0.9)
        other.train(20, 20 + steps)
        before = whole(other), copy.deepcopy(other.scheduler.state_dict()), torch.get_rng_state()
        try:
            load(state(other), checkpoint_id=path / "c")
            problems.append("went through")
        except CheckpointError as error:
            problems += [] if "ValueError: no" in str(error) else [str(error)]
        if (whole(other), other.scheduler.state_dict()) != before[:2]:
            problems.append(f"{steps}: other values")
        if not torch.equal(torch.get_rng_state(), before[2]):
            problems.append(f"{steps}: another random state")
        same.train(20, 20 + steps)
        if other.train(30, 32) != same.train(30, 32) or whole(other) != whole(same):
            problems.append(f"{steps}: another course")
    dist.barrier()
    return problems


@pytest.mark.parametrize("is_first", [False, slow(True)])
@pytest.mark.parametrize(
    "name", [name if name in ("fsdp1", "fsdp2") else slow(name) for name in LAYOUTS]
)
def test_a_load_that_fails_leaves_every_rank(
    ranks: Pool, tmp_path: Path, name: str, is_first: bool
) -> None:
    size = LAYOUTS[name].sizes[0]
    assert ranks(size).run(fail_while_applying, tmp_path, name, is_first) == [[]] * size


def on_first_rank(name: str, steps: int) -> list[bool]:
    """Whether rank 0 alone gets a whole state, the same as all ranks get together."""
    job = build(name)
    job.train(0, steps)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = []
    parts = get_state_dict(job.model, job.optimizer, options=offloaded)
    for part, expected in zip(
        parts, get_state_dict(job.model, job.optimizer, options=FULL), strict=True
    ):
        same = equal_values(part, expected) if dist.get_rank() == 0 else not part
        found.append(same)
    job.train(steps, steps + 1)  # all is as it was
    return found


def equal_values(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal_values(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ["fsdp1", slow("fsdp2"), slow("fsdp2 over tensor"), slow("ddp")])
def test_a_whole_state_on_the_first_rank(ranks: Pool, name: str, steps: int) -> None:
    size = LAYOUTS[name].sizes[0]
    assert ranks(size).run(on_first_rank, name, steps) == [[True, True]] * size


def save_stages_nested(path: Path) -> str:
    job = build("pipeline")
    try:
        save(AppState(job.model, job.optimizer), checkpoint_id=path / "c")
    except ReplicaMismatchError as error:
        return str(error)
    return "went through"


def test_stages_in_the_nested_layout_are_refused(ranks: Pool, tmp_path: Path) -> None:
    for said in ranks(2).run(save_stages_nested, tmp_path):
        assert "optimizer.param_groups.0.params" in said
        assert "flatten_optimizer_state_dict=True" in said


def resume_on_meta(path: Path, name: str) -> list[str]:
    """What differs where the job that is resumed was made without memory."""
    problems = []
    job = build(name)
    job.train(0, 2)
    save(app_of(job, name), checkpoint_id=path / "c")
    resumed = build(name, lr=1.0, device="meta")
    parameters = list(resumed.model.parameters())
    load(app_of(resumed, name), checkpoint_id=path / "c")
    if whole(resumed) != whole(job):
        problems.append("other values")
    if any(one is not two for one, two in zip(parameters, resumed.model.parameters(), strict=True)):
        problems.append("other parameters")
    if resumed.train(2, 5) != job.train(2, 5) or whole(resumed) != whole(job):
        problems.append("another course")
    return problems


@pytest.mark.parametrize("name", ["alone", "fsdp2", slow("tensor"), slow("fsdp2 over tensor")])
def test_a_resume_on_the_meta_device_is_exact(ranks: Pool, tmp_path: Path, name: str) -> None:
    size = LAYOUTS[name].sizes[0]
    assert ranks(size).run(resume_on_meta, tmp_path, name) == [[]] * size
