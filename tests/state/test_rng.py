"""``RngState``: every generator goes on bit by bit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_pipeline
from dcp_pipeline import RankLocal, RngState
from dcp_pipeline.core.errors import StateError
from dcp_pipeline.state import rng as module

KINDS = ["torch_save", "safetensors"]


def draw() -> list[Any]:
    """Numbers of every generator, of which the second of each pair comes out of a cache."""
    return [
        [random.gauss(0, 1) for _ in range(3)],
        [random.getrandbits(70), random.random(), random.sample(range(100), 5)],
        np.random.normal(size=3).tolist(),
        np.random.randint(0, 1 << 30, 5).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
        torch.empty(3).exponential_().tolist(),
    ]


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["in RankLocal", "alone"])
@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_the_next_numbers_are_the_same(
    tmp_path: Path, kind: str, is_wrapped: bool, draws: int
) -> None:
    scramble(3)
    for _ in range(draws):
        # An odd number of normal ones leaves one in the caches of Python and NumPy.
        random.gauss(0, 1), np.random.normal(), torch.randn(1)
    rng = RankLocal(RngState()) if is_wrapped else RngState()
    config = {"serialization": kind}
    dcp_pipeline.save({"rng": rng}, checkpoint_id=tmp_path, config=config)
    wanted = draw()
    scramble(4)
    random.gauss(0, 1), np.random.normal()
    dcp_pipeline.load({"rng": rng}, checkpoint_id=tmp_path, config=config)
    assert draw() == wanted


def test_taking_the_state_draws_nothing() -> None:
    scramble(5)
    wanted = draw()
    scramble(5)
    RngState().state_dict()
    assert draw() == wanted


def test_a_state_is_a_copy() -> None:
    state = RngState().state_dict()
    wanted = draw()
    draw()
    RngState().load_state_dict(state)
    assert draw() == wanted
    RngState().load_state_dict(state)
    assert draw() == wanted


class Greedy:
    """Draws while it is loaded, as an optimizer or a data loader may."""

    def state_dict(self) -> dict[str, Any]:
        draw()
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


@pytest.mark.parametrize("order", [["rng", "a", "b"], ["a", "b", "rng"]])
def test_it_is_set_last(tmp_path: Path, order: list[str]) -> None:
    parts = {"rng": RankLocal(RngState()), "a": Greedy(), "b": RankLocal({"deep": [Greedy()]})}
    dcp_pipeline.save({"rng": RankLocal(RngState())} | parts, checkpoint_id=tmp_path)
    loaded = {name: parts[name] for name in order}
    dcp_pipeline.load(loaded, checkpoint_id=tmp_path)
    first = draw()
    scramble(9)
    dcp_pipeline.load(loaded, checkpoint_id=tmp_path)
    assert draw() == first


class Outer:
    def __init__(self) -> None:
        self.rng = RngState()

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rng"] is self.rng
        draw()


@pytest.mark.parametrize("wrap", [RankLocal, lambda value: value], ids=["in RankLocal", "alone"])
def test_inside_another_object(tmp_path: Path, wrap: Any) -> None:
    state = {"outer": wrap(Outer())}
    dcp_pipeline.save(state, checkpoint_id=tmp_path)
    wanted = draw()
    scramble(1)
    dcp_pipeline.load(state, checkpoint_id=tmp_path)
    assert draw() == wanted


class FailsOnce(RngState):
    """Fails when the generators are set already."""

    has_failed = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if not self.has_failed:
            self.has_failed = True
            raise RuntimeError("not today")


@pytest.mark.parametrize("wrap", [RankLocal, lambda value: value], ids=["in RankLocal", "alone"])
def test_a_load_that_fails_leaves_the_generators(tmp_path: Path, wrap: Any) -> None:
    state = {"rng": wrap(RngState()), "late": wrap(FailsOnce()), "greedy": Greedy()}
    dcp_pipeline.save(state, checkpoint_id=tmp_path)
    scramble(8)
    wanted = draw()
    scramble(8)
    with pytest.raises(RuntimeError, match="not today"):
        dcp_pipeline.load(state, checkpoint_id=tmp_path)
    assert draw() == wanted


@pytest.mark.parametrize(
    "break_it",
    [
        lambda state: state.pop("python"),
        lambda state: state["python"].update(words=[1, 2]),
        lambda state: state["numpy"].update(bit_generator="Other"),
        lambda state: state.update(torch=torch.zeros(3, dtype=torch.uint8)),
        lambda state: state.update(torch=torch.zeros(5056)),
    ],
)
def test_a_state_of_something_else_changes_nothing(break_it: Any) -> None:
    state = RngState().state_dict()
    scramble(6)
    before = RngState().state_dict()
    break_it(state)
    with pytest.raises(StateError, match="not the state of the generators"):
        RngState().load_state_dict(state)
    after = draw()
    RngState().load_state_dict(before)
    assert draw() == after


def test_another_bit_generator_of_numpy(tmp_path: Path) -> None:
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        rng = RankLocal(RngState())
        for kind in KINDS:
            config = {"serialization": kind}
            dcp_pipeline.save({"rng": rng}, checkpoint_id=tmp_path, config=config)
            wanted = draw()
            draw()
            dcp_pipeline.load({"rng": rng}, checkpoint_id=tmp_path, config=config)
            assert draw() == wanted
    finally:
        np.random.set_bit_generator(usual)


class FakeCuda:
    """``torch.cuda`` with as many devices as it is told."""

    def __init__(self, devices: int, in_use: bool = True) -> None:
        self.states = [torch.full((16,), device, dtype=torch.uint8) for device in range(devices)]
        self.in_use = in_use

    def is_available(self) -> bool:
        return bool(self.states)

    def is_initialized(self) -> bool:
        return self.in_use and bool(self.states)

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device].clone()

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state.clone()


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["in RankLocal", "alone"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("saved", "here", "warning"),
    [
        (FakeCuda(2), FakeCuda(2), ""),
        (FakeCuda(2), FakeCuda(2, in_use=False), ""),
        (FakeCuda(0), FakeCuda(0), ""),
        (FakeCuda(2, in_use=False), FakeCuda(2, in_use=False), ""),
        (FakeCuda(0), FakeCuda(2), "of 0 CUDA devices, here are 2"),
        (FakeCuda(1), FakeCuda(2), "of 1 CUDA devices, here are 2"),
        (FakeCuda(2), FakeCuda(1), "of 2 CUDA devices, here are 1"),
        (FakeCuda(2), FakeCuda(0), "of 2 CUDA devices, here are 0"),
    ],
)
def test_cuda_where_there_is_more_or_less_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    saved: FakeCuda,
    here: FakeCuda,
    warning: str,
    kind: str,
    is_wrapped: bool,
) -> None:
    rng = RankLocal(RngState()) if is_wrapped else RngState()
    config = {"serialization": kind}
    here = FakeCuda(len(here.states), here.in_use)
    for state in here.states:
        state.fill_(9)
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "cuda", saved)
        dcp_pipeline.save({"rng": rng}, checkpoint_id=tmp_path, config=config)
    wanted = draw()
    with monkeypatch.context() as patch:
        patch.setattr(module.torch, "cuda", here)
        dcp_pipeline.load({"rng": rng}, checkpoint_id=tmp_path, config=config)
    assert draw() == wanted
    messages = [record.getMessage() for record in caplog.records if "CUDA" in record.getMessage()]
    assert [warning in message for message in messages] == [True] * bool(warning)
    expected = [saved.states[n] if n < len(saved.states) and saved.in_use
                else torch.full((16,), 9, dtype=torch.uint8)
                for n in range(len(here.states))]  # fmt: skip
    assert all(map(torch.equal, here.states, expected))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_itself(tmp_path: Path) -> None:
    torch.randn(1, device="cuda")
    rng = RankLocal(RngState())
    dcp_pipeline.save({"rng": rng}, checkpoint_id=tmp_path)
    wanted = torch.randn(5, device="cuda").tolist()
    torch.randn(1, device="cuda")
    dcp_pipeline.load({"rng": rng}, checkpoint_id=tmp_path)
    assert torch.randn(5, device="cuda").tolist() == wanted
