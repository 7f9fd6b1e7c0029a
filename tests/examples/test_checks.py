"""Each check of the demo passes on what it is for, and fails on everything else."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.checks import (
    died_in_its_data,
    ended_by_sigkill,
    finished,
    losses_within,
    not_a_checkpoint,
    read_losses,
    same_state,
    tidied,
)

LOSSES = {1: 5.5, 2: 4.5, 3: 3.5}
RESUMED = {2: 4.5, 3: 3.5}


def test_losses_of_the_same_bits_pass() -> None:
    assert losses_within("", LOSSES, RESUMED, [2, 3]).holds


@pytest.mark.parametrize(
    "found",
    [
        {2: 4.5, 3: math.nextafter(3.5, 4)},
        {2: 4.5, 3: math.nan},
        {2: 4.5, 3: math.inf},
        {2: 4.5},
        {},
        {1: 5.5, 2: 4.5, 3: 3.5},
        {2: 4.5, 3: 3.5, 4: 3.0},
    ],
    ids=["last bit", "nan", "inf", "stopped early", "empty", "began again", "too long"],
)
def test_other_losses_do_not(found: dict[int, float]) -> None:
    assert not losses_within("", LOSSES, found, [2, 3]).holds


def test_a_tolerance_is_a_part_of_the_loss() -> None:
    assert losses_within("", LOSSES, {2: 4.5 * (1 + 9e-6), 3: 3.5}, [2, 3], 1e-5).holds
    for wrong in (4.5 * (1 + 2e-5), 4.5 * (1 - 2e-5), math.nan):
        assert not losses_within("", LOSSES, {2: wrong, 3: 3.5}, [2, 3], 1e-5).holds


def test_losses_need_something_to_be_compared_with() -> None:
    assert not losses_within("", {2: 4.5}, RESUMED, [2, 3]).holds
    assert not losses_within("", math_nan_losses(), RESUMED, [2, 3], 1e-5).holds
    assert not losses_within("", LOSSES, {}, []).holds


def math_nan_losses() -> dict[int, float]:
    return dict.fromkeys(LOSSES, math.nan)


def test_losses_are_read_with_every_bit(tmp_path: Path) -> None:
    file = tmp_path / "losses.jsonl"
    assert read_losses(file) == {}
    lines = [json.dumps({"step": step, "loss": (0.1 * step).hex()}) for step in (1, 2, 3)]
    file.write_text("\n".join(lines))
    assert read_losses(file) == {1: 0.1, 2: 0.2, 3: 0.1 * 3}
    file.write_text("\n".join([*lines, lines[1]]))
    with pytest.raises(ValueError, match="step 2 twice"):
        read_losses(file)


def state(**changes: Any) -> dict[str, Any]:
    values = {
        "weight": torch.tensor([1.0, float("nan")]),
        "step": torch.tensor(3.0),
        "groups": [{"lr": 0.1, "names": ["weight"], "none": None}],
    }
    return values | changes


def test_equal_states_pass() -> None:
    assert same_state("", state(), state()).holds


@pytest.mark.parametrize(
    "found",
    [
        state(weight=torch.tensor([1.0, 0.0])),
        state(weight=torch.tensor([1.0000001, float("nan")])),
        state(weight=torch.tensor([1.0, float("nan")], dtype=torch.float64)),
        state(weight=torch.tensor([[1.0, float("nan")]])),
        state(weight=None),
        state(step=torch.tensor(-3.0)),
        state(groups=[{"lr": 0.2, "names": ["weight"], "none": None}]),
        state(groups=[{"lr": 0.1, "names": ["weight"]}]),
        state(groups=[{"lr": 0.1, "names": ["weight", "bias"], "none": None}]),
        state(groups=[]),
        state(more=1),
        {"weight": torch.tensor([1.0, float("nan")])},
    ],
)
def test_other_states_do_not(found: dict[str, Any]) -> None:
    assert not same_state("", state(), found).holds


def test_a_state_without_tensors_proves_nothing() -> None:
    assert not same_state("", {}, {}).holds


def test_zero_and_minus_zero_have_other_bits() -> None:
    assert not same_state("", {"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}).holds


def test_a_job_ends_well_with_exit_code_0_alone() -> None:
    assert finished("", 0, "anything").holds
    assert not finished("", 1, "").holds
    assert not finished("", None, "").holds
    assert "exit code 1: the cause" in finished("", 1, "more\nthe cause\n").found


TORCHRUN = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 9820)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 9821)  (SIGKILL)
"""


@pytest.mark.parametrize(
    ("exit_code", "log", "rank", "expected"),
    [
        (1, TORCHRUN, 1, True),
        (0, TORCHRUN, 1, False),
        (None, TORCHRUN, 1, False),
        (1, TORCHRUN, 0, False),
        (1, TORCHRUN.replace("-9 ", "1 "), 1, False),
        (1, "", 1, False),
    ],
    ids=["killed", "ended well", "did not end", "another rank", "raised", "no report"],
)
def test_a_sigkill(exit_code: int | None, log: str, rank: int, expected: bool) -> None:
    assert ended_by_sigkill("", exit_code, log, rank).holds is expected


@pytest.fixture
def torso(tmp_path: Path) -> Path:
    folder = tmp_path / "killed" / "step-8"
    folder.mkdir(parents=True)
    (folder / "__1_0.11111111.distcp").write_bytes(bytes(10))
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "unbroken" / "step-8"
    folder.mkdir(parents=True)
    (folder / "__1_0.22222222.distcp").write_bytes(bytes(100))
    (folder / "__1_0.22222222.sums").write_bytes(bytes(5))
    return folder


@pytest.mark.parametrize(
    ("log", "rank", "expected"),
    [
        ("SIGKILL after 10 bytes of __1_0.11111111.distcp", 1, True),
        ("SIGKILL after 10 bytes of __1_0.11111111.distcp", 0, False),
        ("SIGKILL after 100 bytes of __1_0.11111111.distcp", 1, False),
        ("SIGKILL after 0 bytes of __1_0.11111111.distcp", 1, False),
        ("SIGKILL after 10 bytes of __1_1.11111111.distcp", 1, False),
        ("", 1, False),
    ],
    ids=["within", "another rank", "at the end", "before", "no file", "no kill"],
)
def test_a_death_in_the_data(log: str, rank: int, expected: bool, torso: Path, whole: Path) -> None:
    assert died_in_its_data("", log, torso, whole, rank).holds is expected


@pytest.mark.parametrize("record", ["manifest.json", ".metadata"])
def test_a_torso_is_no_checkpoint(torso: Path, record: str) -> None:
    assert not_a_checkpoint("", [4], [4], torso).holds
    assert not not_a_checkpoint("", [4, 8], [4], torso).holds
    assert not not_a_checkpoint("", [], [4], torso).holds
    assert not not_a_checkpoint("", [4], [4], torso.parent / "step-12").holds
    (torso / record).touch()
    assert not not_a_checkpoint("", [4], [4], torso).holds


def test_what_a_killed_save_left_has_to_go(torso: Path) -> None:
    left = {"__1_0.11111111.distcp"}
    assert not tidied("", left, torso).holds
    (torso / "__1_0.11111111.distcp").rename(torso / "__1_0.33333333.distcp")
    assert tidied("", left, torso).holds
    assert not tidied("", set(), torso).holds
    assert not tidied("", left, torso.parent / "step-12").holds
