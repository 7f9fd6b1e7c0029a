"""Saved on one layout, loaded on the others; and a resume on the same is exact."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline import AppState, ReplicaMismatchError, load, save
from dcp_pipeline.state.helpers import StateDictOptions, get_state_dict
from tests.distributed.pool import Pool
from tests.marks import slow
from tests.parallelism.layouts import LAYOUTS, Job, build

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


def train_unbroken_and_resume(path: Path, name: str) -> list[str]:
    """What differs between an unbroken run and one that was resumed, also before the first step."""
    problems = []
    for before in (0, 3):
        unbroken, broken = build(name), build(name)
        broken.train(0, before)
        save(app_of(broken, name), checkpoint_id=path / f"{name} {before}")
        unbroken.train(0, before)
        losses = unbroken.train(before, before + 3)
        resumed = build(name, lr=1.0)
        resumed.train(40, 42)
        load(app_of(resumed, name), checkpoint_id=path / f"{name} {before}")
        if resumed.train(before, before + 3) != losses:
            problems.append(f"{before}: other losses")
        if whole(resumed) != whole(unbroken):
            problems.append(f"{before}: other values")
        if resumed.scheduler.state_dict() != unbroken.scheduler.state_dict():
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


@pytest.mark.parametrize(
    "name", [slow(name) if name in ("hsdp", "context") else name for name in LAYOUTS]
)
def test_t38_a_resume_is_exact(ranks: Pool, tmp_path: Path, name: str) -> None:
    size = LAYOUTS[name].sizes[0]
    assert ranks(size).run(train_unbroken_and_resume, tmp_path, name) == [[]] * size


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
