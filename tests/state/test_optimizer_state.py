"""Optimizer state by name: exactly what is there, also where nothing is."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_pipeline import AppState, load, save
from dcp_pipeline.core.errors import LoadMismatchError, MissingKeyError, StateError
from dcp_pipeline.state.helpers import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from tests.state.optimizers import LAYOUTS, bits, model_of, plain, train

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
}


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_resume_is_exact(tmp_path: Path, kind: str, before: int, options: Any) -> None:
    unbroken = model_of()
    optimizer = OPTIMIZERS[kind](unbroken.parameters())
    train(unbroken, optimizer, before)
    save({"app": AppState(unbroken, optimizer, options=options)}, checkpoint_id=tmp_path / "c")
    train(unbroken, optimizer, 2, seed=8)
    for steps in (0, 3):
        other = model_of(1)
        fresh = OPTIMIZERS[kind](other.parameters())
        train(other, fresh, steps, seed=5)
        load({"app": AppState(other, fresh, options=options)}, checkpoint_id=tmp_path / "c")
        train(other, fresh, 2, seed=8)
        assert bits(other) == bits(unbroken)
        assert plain(fresh.state_dict()) == plain(optimizer.state_dict())


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_t34_reading_changes_nothing(kind: str, options: Any) -> None:
    read, unread = model_of(), model_of()
    one, other = (OPTIMIZERS[kind](model.parameters()) for model in (read, unread))
    for steps in (0, 2):
        train(read, one, steps)
        train(unread, other, steps)
        get_state_dict(read, one, options=options)
        assert plain(one.state_dict()) == plain(other.state_dict())
        assert bits(read) == bits(unread)
        assert all(parameter.grad is None for parameter in read.parameters()) == (steps == 0)
    train(read, one, 1)
    train(unread, other, 1)
    assert bits(read) == bits(unread)


def test_t30_gradients_and_no_step_yet(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    found = get_optimizer_state_dict(model, optimizer)
    assert found["state"] == {name: {} for name, _ in model.named_parameters()}
    save({"optimizer": found}, checkpoint_id=tmp_path / "c")
    other = model_of(1)
    stepped = torch.optim.AdamW(other.parameters())
    train(other, stepped, 2)
    state = {"optimizer": get_optimizer_state_dict(other, stepped)}
    load(state, checkpoint_id=tmp_path / "c")
    set_optimizer_state_dict(other, stepped, state["optimizer"])
    assert not stepped.state


@pytest.mark.parametrize("options", LAYOUTS)
def test_t30_a_section_that_is_empty_is_no_success(tmp_path: Path, options: Any) -> None:
    model = model_of()
    fresh = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": {"param_groups": []}}
    save(state, checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadMismatchError, match=r"optimizer\.state\.0\.weight\.exp_avg"):
        load({"app": 1} and AppState(model, fresh, options=options), checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("options", LAYOUTS)
def test_t31_only_one_of_two_was_stepped(tmp_path: Path, options: Any) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    app = AppState(model, optimizer, options=options)
    save(app, checkpoint_id=tmp_path / "c")
    for steps in (0, 2):
        other = model_of(1)
        fresh = torch.optim.AdamW(other.parameters(), lr=0.2)
        train(other, fresh, steps)
        load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
        assert plain(fresh.state_dict()) == plain(optimizer.state_dict())
        assert set(fresh.state) == set(other[0].parameters())


@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize("removed", ["exp_avg_sq", None])
def test_t31_t33_what_was_removed_is_named(
    tmp_path: Path, options: Any, removed: str | None
) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    found = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    if options is None:
        state = found["state"]
        del (state["1.weight"] if removed else state)[removed or "1.weight"]
    else:
        for key in [key for key in found if key.startswith(f"state.1.weight.{removed or ''}")]:
            del found[key]
    save({"model": model.state_dict(), "optimizer": found}, checkpoint_id=tmp_path / "c")
    for steps in (0, 1):
        other = model_of(1)
        fresh = torch.optim.AdamW(other.parameters())
        train(other, fresh, steps)
        before = bits(other), plain(fresh.state_dict())
        with pytest.raises(MissingKeyError) as raised:
            load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
        names = {key.removeprefix("optimizer.state.1.weight.") for key in raised.value.missing}
        assert names == ({removed} if removed else {"step", "exp_avg", "exp_avg_sq"})
        assert (bits(other), plain(fresh.state_dict())) == before
    if removed is None:
        with pytest.raises(MissingKeyError, match=r"1\.weight"):
            set_optimizer_state_dict(model, optimizer, found)
        set_optimizer_state_dict(model, optimizer, found, options=StateDictOptions(strict=False))
        assert len(optimizer.state) == 3


@pytest.mark.parametrize("options", LAYOUTS)
def test_t37_groups_in_another_order(tmp_path: Path, options: Any) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(
        [
            {"params": list(model[0].parameters()), "lr": 0.1, "betas": (0.5, 0.6)},
            {"params": list(model[1].parameters()), "lr": 0.01},
        ]
    )
    train(model, optimizer, 2)
    save(AppState(model, optimizer, options=options), checkpoint_id=tmp_path / "c")
    other = model_of(1)
    fresh = torch.optim.AdamW(
        [
            {"params": list(other[1].parameters()), "lr": 5.0},
            {"params": [other[0].bias], "lr": 6.0},
            {"params": [other[0].weight], "lr": 7.0},
        ]
    )
    load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
    found = [(group["lr"], group["betas"]) for group in fresh.param_groups]
    assert found == [(0.01, (0.9, 0.999)), (0.1, (0.5, 0.6)), (0.1, (0.5, 0.6))]
    train(model, optimizer, 2, seed=9)
    train(other, fresh, 2, seed=9)
    assert bits(model) == bits(other)
    # And into fewer groups, where they do not agree.
    single = torch.optim.AdamW(other.parameters())
    with pytest.raises(StateError, match=r"0\.weight and 1\.weight are in one parameter group"):
        load(AppState(other, single, options=options), checkpoint_id=tmp_path / "c")


def test_t36_an_empty_group(tmp_path: Path) -> None:
    def make(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": [], "lr": lr}, {"params": list(model.parameters()), "lr": 2 * lr}]
        )

    model, other = model_of(), model_of(1)
    optimizer, fresh = make(model, 0.1), make(other, 3.0)
    train(model, optimizer, 1)
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    train(model, optimizer, 1)
    train(other, fresh, 1)
    assert bits(model) == bits(other)


def test_several_optimizers_over_one_model(tmp_path: Path) -> None:
    def make(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(model[1].parameters(), lr=0.2),
        ]

    model, other = model_of(), model_of(1)
    ours, fresh = make(model), make(other)[::-1]
    for optimizer in ours:
        train(model, optimizer, 2)
    save(AppState(model, ours), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert plain(fresh[1].state_dict()) == plain(ours[0].state_dict())
    assert plain(fresh[0].state_dict()) == plain(ours[1].state_dict())
    with pytest.raises(StateError, match="two optimizers"):
        get_optimizer_state_dict(model, [ours[0], torch.optim.SGD(model[0].parameters())])
    with pytest.raises(StateError, match="the model does not have"):
        get_optimizer_state_dict(model[0], ours[1])


def test_frozen_parameters(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    for each in (model, other):
        each[0].requires_grad_(False)
    optimizer, fresh = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    train(model, optimizer, 2)
    options = StateDictOptions(ignore_frozen_params=True)
    app = AppState(model, optimizer, options=options)
    assert list(app.state_dict()["model"]) == ["1.weight", "1.bias"]
    assert list(app.state_dict()["optimizer"]["state"]) == ["1.weight", "1.bias"]
    save(app, checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh, options=options), checkpoint_id=tmp_path / "c")
    assert bits(other[1]) == bits(model[1])
    assert bits(other[0]) != bits(model[0])
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())


class Shampoo(torch.optim.Optimizer):
    """State that is nested, with integers for keys and a tensor that changes its size."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["factors"] = {
                        axis: {"matrix": torch.zeros(extent, extent), "root": {}}
                        for axis, extent in enumerate(parameter.shape)
                    }
                    state["seen"] = 0
                state["seen"] += 1
                for axis, factor in state["factors"].items():
                    rows = (
                        parameter.grad.movedim(axis, 0).flatten(1)
                        if parameter.dim() > 1
                        else (parameter.grad[:, None])
                    )
                    factor["matrix"] += rows @ rows.T
                parameter -= group["lr"] * parameter.grad / (1 + state["seen"])


def test_nested_state(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = Shampoo(model.parameters()), Shampoo(other.parameters())
    train(model, optimizer, 2)
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())
    for each in (fresh, torch.optim.AdamW(other.parameters())):
        if isinstance(each, torch.optim.AdamW):
            with pytest.raises(LoadMismatchError, match="exp_avg"):
                load(AppState(other, each), checkpoint_id=tmp_path / "c")


class Capped(torch.optim.Optimizer):
    """Has a setting of its own, which is in no group, and wants ``lr`` to be a tensor."""

    def __init__(self, params: Any, cap: float) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})
        self.cap = cap

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], torch.Tensor)
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["seen"] = parameter.new_zeros((2, *parameter.shape))
                state["seen"] += parameter.grad.clamp(max=self.cap)
                parameter.sub_(group["lr"] * state["seen"].sum(0))


def test_settings_of_an_optimizers_own(tmp_path: Path) -> None:
    """What it keeps is known before its first step, and missed where a checkpoint lacks it."""
    model = nn.Linear(3, 2)
    optimizer = Capped(model.parameters(), cap=0.5)
    state = {"app": AppState(model, optimizer)}
    bare = {"model": state["app"].state_dict()["model"], "optimizer": {"param_groups": []}}
    save({"app": bare}, checkpoint_id=tmp_path)
    with pytest.raises(LoadMismatchError, match=r"app\.optimizer\.state\.weight\.seen"):
        load(state, checkpoint_id=tmp_path)


class Outer(torch.optim.Optimizer):
    """Steps another optimizer; how often stands in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.AdamW([p for g in self.param_groups for p in g["params"]], lr=0.1)
        self.steps: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.steps.append(1)
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.tensor(float(len(self.steps)))


def test_an_optimizer_around_another_is_not_stepped(tmp_path: Path) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = Outer(model.parameters()), Outer(other.parameters())
    train(model, optimizer, 2)
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    other(torch.ones(1, 3)).sum().backward()
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert bits(other) == bits(model)
    assert fresh.steps == [] and not fresh.inner.state
    assert {float(state["seen"]) for state in fresh.state.values()} == {2.0}


def test_state_keeps_its_dtype(tmp_path: Path) -> None:
    def half() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = model_of().bfloat16()
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            state = {"step": torch.tensor(3.0)}
            state |= {
                name: torch.full(parameter.shape, 1 + 2**-20) for name in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = state
        return model, optimizer

    model, optimizer = half()
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    other, fresh = half()
    for state in fresh.state.values():
        state["exp_avg"].zero_()
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert plain([*fresh.state.values()]) == plain([*optimizer.state.values()])
