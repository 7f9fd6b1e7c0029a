"""The short examples of layouts: what they say of themselves holds."""

from pathlib import Path
from typing import Any

import pytest

from dcp_pipeline import AppState, load
from tests.distributed.pool import Pool
from tests.examples.running import call, torchrun
from tests.marks import slow

TRAIN_LORA = ("train_lora", "train")
CLOSE = 1e-5
"""Part of a loss that another order of additions may move."""


def train(example: str, root: Path, *steps: int) -> list[float]:
    """The losses of one job after another."""
    return [loss for until in steps for loss in call(example, "train", str(root), until)]


@pytest.mark.parametrize(("example", "size"), [slow("train_fsdp2_tp", 4), ("train_pipeline", 2)])
def test_a_resume_is_exact(ranks: Pool, tmp_path: Path, example: str, size: int) -> None:
    unbroken = ranks(size).run(train, example, tmp_path / "unbroken", 6)
    broken = ranks(size).run(train, example, tmp_path / "broken", 3, 6)
    assert broken == unbroken
    assert len(unbroken[-1]) == 6
    assert unbroken[-1][-1] < unbroken[-1][0]


@pytest.mark.parametrize(
    ("example", "sizes"), [("train_fsdp2_tp", (2, 4)), ("train_pipeline", (4, 1))]
)
def test_it_goes_on_with_another_number_of_ranks(
    ranks: Pool, tmp_path: Path, example: str, sizes: tuple[int, int]
) -> None:
    before = ranks(sizes[0]).run(train, example, tmp_path / "one", 3)[-1]
    after = ranks(sizes[1]).run(train, example, tmp_path / "one", 6)[-1]
    unbroken = ranks(sizes[1]).run(train, example, tmp_path / "other", 6)[-1]
    assert before + after == pytest.approx(unbroken, rel=CLOSE)


def load_whole(path: Path) -> dict[str, Any]:
    """A checkpoint of stages, in a model and an optimizer of one piece."""
    model = call("train_pipeline", "decoder")
    optimizer = call("migrate_ddp_to_fsdp2", "adamw", model)
    report = load(AppState(model, optimizer), checkpoint_id=path)
    assert not report.unexpected
    return {name: optimizer.state[p]["step"].item() for name, p in model.named_parameters()}


def test_stages_are_a_whole_model(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(train, "train_pipeline", tmp_path, 3)
    steps = ranks(1).run(load_whole, tmp_path / "step-3")[0]
    assert len(steps) == 53
    assert set(steps.values()) == {3.0}


def test_from_ddp_to_fsdp2(ranks: Pool, tmp_path: Path) -> None:
    for ddp, fsdp2 in ranks(2).run(call, "migrate_ddp_to_fsdp2", "migrate", str(tmp_path)):
        assert len(ddp) == 3
        assert fsdp2 == pytest.approx(ddp, rel=CLOSE)


@pytest.mark.parametrize("use_peft", [False, True])
def test_lora(ranks: Pool, tmp_path: Path, use_peft: bool) -> None:
    if use_peft:
        pytest.importorskip("peft")

    def train_on(size: int, root: str, steps: int) -> list[float]:
        return ranks(size).run(call, *TRAIN_LORA, str(tmp_path / root), steps, 0, use_peft)[0]

    before = train_on(2, "broken", 3)
    assert folder_size(tmp_path / "broken" / "step-3") < 200_000
    after = train_on(1, "broken", 6)
    assert before + after == pytest.approx(train_on(1, "unbroken", 6), rel=CLOSE)
    root = tmp_path / "broken"
    for failure in ranks(2).fail(call, *TRAIN_LORA, str(root), 9, 1, use_peft):
        assert "load the base that they were trained on" in failure.message
    assert not (root / "step-9").exists()


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_and_example", "arguments"),
    [
        ((4, "train_fsdp2_tp"), ["6"]),
        ((2, "train_pipeline"), ["6"]),
        ((2, "migrate_ddp_to_fsdp2"), []),
        ((2, "train_lora"), ["6"]),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_under_torchrun(
    tmp_path: Path, ranks_and_example: tuple[int, str], arguments: list[str]
) -> None:
    done = torchrun(*ranks_and_example, str(tmp_path / "run"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 steps: " in done.stdout or "FSDP2: " in done.stdout
