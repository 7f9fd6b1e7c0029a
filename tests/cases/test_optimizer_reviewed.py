"""What a reviewer found in the state of optimizers and models; each stands for its kind."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_pipeline import (
    AppState,
    FileSystemReader,
    LoadMismatchError,
    MissingKeyError,
    ShapeMismatchError,
    StateDictOptions,
    UnexpectedKeyError,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    load_sharded_optimizer_state_dict,
    save,
    set_optimizer_state_dict,
)
from tests.distributed.pool import Pool
from tests.state.optimizers import LAYOUTS, bits, model_of, plain, train


class Ends(nn.Module):
    def __init__(self, is_tied: bool, value: float) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, value)
        nn.init.constant_(self.last.weight, 2 * value if value < 5 else value)
        if is_tied:
            self.last.weight = self.first.weight


@pytest.mark.parametrize("is_app", [True, False])
def test_values_that_differ_do_not_go_to_one_tensor(tmp_path: Path, is_app: bool) -> None:
    wrap: Any = AppState if is_app else (lambda model: model)
    save({"m": wrap(Ends(False, 1.0))}, checkpoint_id=tmp_path / "differ")
    save({"m": wrap(Ends(False, 7.0))}, checkpoint_id=tmp_path / "equal")
    tied = Ends(True, 3.0)
    before = tied.first.weight.tolist()
    with pytest.raises(LoadMismatchError, match=r"first\.weight and .*last\.weight"):
        load({"m": wrap(tied)}, checkpoint_id=tmp_path / "differ")
    assert tied.first.weight.tolist() == before
    load({"m": wrap(tied)}, checkpoint_id=tmp_path / "equal")
    assert tied.last.weight.tolist() == [[7.0, 7.0]] * 2


def test_values_of_one_tensor_that_nobody_has_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"fingerprint": False}
    save({"m": Ends(False, 7.0)}, checkpoint_id=tmp_path / "c", config=config)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load({"m": Ends(True, 3.0)}, checkpoint_id=tmp_path / "c")
    assert "first.weight and m.last.weight" in caplog.text


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_layer_that_was_frozen_after_some_steps(tmp_path: Path, options: Any) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    train(model, optimizer, 2)
    for each in (model, other):
        each[0].requires_grad_(False)
    save(AppState(model, optimizer, options=options), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())
    for each in (model, other):
        each[0].requires_grad_(True)
    train(model, optimizer, 2)
    train(other, fresh, 2)
    assert bits(other) == bits(model)


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_layer_that_is_trained_from_now_on(tmp_path: Path, options: Any) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    model[0].requires_grad_(False)
    train(model, optimizer, 2)
    save(AppState(model, optimizer, options=options), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
    model[0].requires_grad_(True)
    train(model, optimizer, 2)
    train(other, fresh, 2)
    assert bits(other) == bits(model)


def lacks_an_entry(state: Any) -> None:
    del state["state"]["0.weight"]["exp_avg_sq"]


def has_another_shape(state: Any) -> None:
    state["state"]["0.weight"]["exp_avg_sq"] = torch.zeros(3)


def has_a_text(state: Any) -> None:
    state["state"]["0.weight"]["exp_avg_sq"] = "none"


def lacks_groups(state: Any) -> None:
    del state["param_groups"]


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("change", "error", "name"),
    [
        (lacks_an_entry, MissingKeyError, r"0\.weight\.exp_avg_sq"),
        (has_another_shape, ShapeMismatchError, r"0\.weight\.exp_avg_sq: \[3\]"),
        (has_a_text, ShapeMismatchError, r"0\.weight\.exp_avg_sq: str"),
        (lacks_groups, MissingKeyError, r"param_groups of 0\.weight"),
    ],
)
def test_states_that_no_optimizer_could_step_with(
    change: Any, error: Any, name: str, steps: int
) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    train(model, optimizer, 1)
    train(other, fresh, steps)
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    change(state)
    before = plain(copy.deepcopy(fresh.state_dict()))
    with pytest.raises(error, match=name):
        set_optimizer_state_dict(other, fresh, state)
    assert plain(fresh.state_dict()) == before


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(3, 4), "text"], ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_moments_of_another_shape_or_kind(tmp_path: Path, value: Any, steps: int) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    train(model, optimizer, 1)
    train(other, fresh, steps)
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    state["state"]["0.weight"]["exp_avg_sq"] = value
    save({"model": model, "optimizer": state}, checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadMismatchError, match=r"0\.weight\.exp_avg_sq"):
        load(AppState(other, fresh), checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("adam", "sgd"), ("adam", "momentum"), ("amsgrad", "adam")],
)
def test_state_of_another_optimizer(tmp_path: Path, saved: str, loaded: str) -> None:
    kinds: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.AdamW(p),
        "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    }
    model, other = model_of(), model_of(1)
    optimizer, fresh = kinds[saved](model.parameters()), kinds[loaded](other.parameters())
    train(model, optimizer, 1)
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadMismatchError) as raised:
        load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert raised.value.unexpected
    assert isinstance(raised.value, UnexpectedKeyError) == (loaded != "momentum")


class Unknown(torch.optim.Optimizer):
    """Keeps a list, so that nobody may step a copy of it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.seen: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["one"] = torch.ones_like(parameter)
            state["other"] = torch.ones_like(parameter)


def test_a_gap_that_only_others_show(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, other = model_of(), model_of(1)
    optimizer = Unknown(model.parameters())
    optimizer.step()
    state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    del state["state"]["0.weight"]["other"]
    save({"model": model, "optimizer": state}, checkpoint_id=tmp_path / "c")
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load(AppState(other, Unknown(other.parameters())), checkpoint_id=tmp_path / "c")
    assert "0.weight: other" in caplog.text and "1.weight" not in caplog.text


class Sends(torch.optim.Optimizer):
    """Its step is a collective."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            total = torch.ones(())
            dist.all_reduce(total)
            self.state[parameter]["total"] = total


def load_with_another_number_of_parameters(path: Path) -> list[float]:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def stage() -> nn.Module:
        rank = dist.get_rank()
        return nn.ModuleDict({f"{rank}{n}": nn.Linear(2, 2) for n in range(rank + 1)})

    model, other = stage(), stage()
    optimizer, fresh = Sends(model.parameters()), Sends(other.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter]["total"] = torch.tensor(2.0)
    save(AppState(model, optimizer, options=flat), checkpoint_id=path / "c")
    load(AppState(other, fresh, options=flat), checkpoint_id=path / "c")
    return [float(state["total"]) for state in fresh.state.values()]


def test_nobody_waits_in_the_step_of_a_stand_in(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(2).run(load_with_another_number_of_parameters, tmp_path, seconds=40.0)
    assert found == [[2.0] * 2, [2.0] * 4]


class Nests(torch.optim.Optimizer):
    """Nested state with integers for keys, a text and an empty mapping."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state.update({"block": {0: {"sum": torch.zeros(())}}, "name": "z", "more": {}})
            state["block"][0]["sum"] += parameter.grad.sum()
            parameter.sub_(0.1 * state["block"][0]["sum"])


@pytest.mark.parametrize("loaded", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_keys_and_texts_of_a_state(tmp_path: Path, saved: Any, loaded: Any) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = Nests(model.parameters()), Nests(other.parameters())
    train(model, optimizer, 2)
    save(AppState(model, optimizer, options=saved), checkpoint_id=tmp_path / "c")
    for _ in range(2):
        load(AppState(other, fresh, options=loaded), checkpoint_id=tmp_path / "c")
        assert plain(fresh.state_dict()) == plain(optimizer.state_dict())
    train(model, optimizer, 1)
    train(other, fresh, 1)
    assert bits(other) == bits(model)


@pytest.mark.parametrize("options", LAYOUTS)
def test_torch_reads_back_what_the_helpers_give(tmp_path: Path, options: Any) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    for state in (
        get_model_state_dict(model),
        get_optimizer_state_dict(model, optimizer, options=options),
        AppState(model, optimizer, options=options).state_dict(),
    ):
        torch.save(state, tmp_path / "state.pt")
        assert plain(torch.load(tmp_path / "state.pt")) == plain(state)


@pytest.mark.parametrize("options", LAYOUTS)
def test_moments_that_are_finer_than_their_parameters(tmp_path: Path, options: Any) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    train(model, optimizer, 2)
    model.bfloat16()
    other.bfloat16()
    save(AppState(model, optimizer, options=options), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())


def test_an_optimizer_that_lies_deeper(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    save({"app": AppState(model, optimizer)}, checkpoint_id=tmp_path / "c")
    found = load_sharded_optimizer_state_dict(
        get_model_state_dict(model), "app.optimizer", FileSystemReader(tmp_path / "c")
    )
    assert plain(found) == {"app.optimizer": plain(get_optimizer_state_dict(model, optimizer))}


def send_nothing() -> str:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_optimizer_state_dict(model, optimizer, {}, options=options)
    except MissingKeyError as error:
        return str(error)
    return "went through"


def test_nothing_to_send(ranks: Pool) -> None:
    for said in ranks(2).run(send_nothing):
        assert "0.weight" in said
