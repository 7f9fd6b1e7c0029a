"""Ways to load an optimizer's state: the helpers, planners of DCP's, a part that is left out."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dcp_pipeline import (
    AppState,
    DefaultLoadPlanner,
    MissingKeyError,
    StateDictOptions,
    load,
    save,
)
from dcp_pipeline.state.first_step import state_after_a_step
from dcp_pipeline.state.flatten import flatten
from dcp_pipeline.state.helpers import (
    get_state_dict,
    set_state_dict,
)
from dcp_pipeline.state.model_names import ModelNames
from dcp_pipeline.state.optimizer_state import owners
from tests.distributed.pool import Pool
from tests.state.optimizers import LAYOUTS, bits, model_of, plain, train


@pytest.mark.parametrize("options", LAYOUTS)
def test_what_is_handed_in_is_left_as_it_is(options: Any) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    weights, state = get_state_dict(model, optimizer, options=options)
    before = plain(dict(weights)), plain(copy.deepcopy(state))
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options
    )
    assert (plain(dict(weights)), plain(dict(state))) == before


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner], ids=["ours", "planner of DCP's"])
@pytest.mark.parametrize("options", LAYOUTS)
def test_the_usual_three_calls(tmp_path: Path, options: Any, planner: Any) -> None:
    """get, load, set: also where the optimizer has no state yet, and nothing is an AppState."""
    model, other = model_of(), model_of(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer, options=options)
    save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "c")
    fresh = torch.optim.AdamW(other.parameters())
    weights, state = get_state_dict(other, fresh, options=options)
    load(
        {"model": weights, "optimizer": state},
        checkpoint_id=tmp_path / "c",
        planner=planner and planner(),
    )
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
    assert bits(other) == bits(model)
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_planner_of_dcps_and_an_object_without_state(tmp_path: Path, options: Any) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    train(model, optimizer, 2)
    save({"app": AppState(model, optimizer, options=options)}, checkpoint_id=tmp_path / "c")
    app = AppState(other, fresh, options=options)
    load({"app": app}, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner())
    assert bits(other) == bits(model)
    assert plain(fresh.state_dict()) == plain(optimizer.state_dict())


class Factored(torch.optim.Optimizer):
    """Keeps a value per row and one per column, and notes the parameters that it steps."""

    stepped: ClassVar[list[torch.Tensor]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            self.stepped.append(parameter)
            state = self.state[parameter]
            for name, dim in (("rows", -1), ("columns", 0)):
                state.setdefault(name, torch.zeros_like(parameter.grad.sum(dim)))
                state[name].add_(parameter.grad.square().sum(dim))
            state.setdefault("kept", [torch.zeros(3)])[0].add_(1)
            parameter.sub_(parameter.grad, alpha=0.01)


def load_sharded(path: Path, flat: bool) -> tuple[dict[str, int], list[bool], Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    made = []
    for seed in (0, 1):
        model = model_of(seed)
        for layer in model:
            layer.bias = None  # of one dimension
        fully_shard(model, mesh=mesh)
        made.append((model, Factored(model.parameters())))
    (model, optimizer), (other, fresh) = made
    train(model, optimizer, 2)
    save(AppState(model, optimizer, options=options), checkpoint_id=path)
    Factored.stepped.clear()
    app = AppState(other, fresh, options=options)
    load(app, checkpoint_id=path)
    kinds = ["real" if isinstance(each, DTensor) else each.device.type for each in Factored.stepped]
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    same = [
        torch.equal(value.full_tensor(), fresh.state[two][key].full_tensor())
        and value.placements == fresh.state[two][key].placements
        for one, two in pairs
        for key, value in optimizer.state[one].items()
        if isinstance(value, DTensor)
    ]
    return dict(Counter(kinds)), same, plain(fresh.state[next(other.parameters())]["kept"])


@pytest.mark.parametrize("flat", [False, True])
def test_a_first_step_is_tried_once(ranks: Pool, tmp_path: Path, flat: bool) -> None:
    for kinds, same, kept in ranks(2).run(load_sharded, tmp_path, flat):
        # Two parameters, when the template is made and when the optimizer takes its state.
        assert kinds["meta"] <= 4
        assert kinds["real"] == 2
        assert same == [True] * 4
        assert kept == [("torch.float32", [2.0] * 3)]


class Remembers(torch.optim.Optimizer):
    """Keeps all gradients, and pairs of what it was given; steps by the sum of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("past", {}).setdefault(0, []).append(parameter.grad.clone())
            state.setdefault("pairs", []).append({"sum": parameter.grad.sum(), "at": len(state)})
            parameter.sub_(sum(state["past"][0]), alpha=0.01)


def closure_steps(model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        given = torch.randn(5, 3, generator=generator)

        def closure(given: torch.Tensor = given) -> float:
            optimizer.zero_grad()
            loss = model(given).square().sum()
            loss.backward()
            return float(loss.detach())

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("before", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "make", [Remembers, lambda all: torch.optim.LBFGS(all, lr=0.1, max_iter=3)]
)
@pytest.mark.parametrize("options", LAYOUTS)
def test_lists_have_the_length_that_they_were_saved_with(
    tmp_path: Path, options: Any, make: Any, before: int
) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = make(model.parameters()), make(other.parameters())
    closure_steps(model, optimizer, 2, seed=3)
    save({"app": AppState(model, optimizer, options=options)}, checkpoint_id=tmp_path / "c")
    closure_steps(other, fresh, before, seed=4)
    app = AppState(other, fresh, options=options)
    if isinstance(optimizer, Remembers) and before:
        # A planner of DCP's cannot put tensors in the place of other values.
        load({"app": app}, checkpoint_id=tmp_path / "c", planner=DefaultLoadPlanner())
        assert plain(fresh.state_dict()["state"]) == plain(optimizer.state_dict()["state"])
        closure_steps(other, fresh, before, seed=4)
    load({"app": app}, checkpoint_id=tmp_path / "c")
    assert plain(fresh.state_dict()["state"]) == plain(optimizer.state_dict()["state"])
    for each, its in ((model, optimizer), (other, fresh)):
        closure_steps(each, its, 2, seed=5)
    assert bits(other) == bits(model)


def test_an_entry_that_is_no_part_of_a_list_is_still_missed(tmp_path: Path) -> None:
    model = model_of()
    optimizer = Remembers(model.parameters())
    closure_steps(model, optimizer, 2, seed=3)
    leave_out = {"kind": "exclude", "keys": ["optimizer.state.0.weight.pairs.*"], "on": "save"}
    app = AppState(model, optimizer)
    save(app, checkpoint_id=tmp_path / "c", config={"transforms": [leave_out]})
    with pytest.raises(MissingKeyError, match=r"0\.weight\.pairs\.1"):
        load(app, checkpoint_id=tmp_path / "c")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor, Factored])
def test_what_is_found_out_takes_no_memory(optimizer: Any) -> None:
    model = model_of()
    for is_real in (False, True):
        for parameter in owners(ModelNames(model), [optimizer(model[:1].parameters())]):
            if optimizer is Factored and parameter.tensor.dim() < 2:
                continue
            found = state_after_a_step(parameter, is_real)
            assert found
            assert state_after_a_step(parameter, is_real) is found
            for leaf in flatten(dict(found)).leaves:
                storage = leaf.value.untyped_storage()
                assert leaf.value.is_meta or storage.nbytes() <= 8


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("saved_steps", [0, 2])
@pytest.mark.parametrize("options", LAYOUTS)
def test_an_optimizer_that_is_left_out_stays(
    tmp_path: Path, options: Any, saved_steps: int, steps: int
) -> None:
    model, other = model_of(), model_of(1)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other))
    train(model, optimizer, saved_steps)
    train(other, fresh, steps)
    fresh.param_groups[0]["lr"] = 0.7
    before = plain(copy.deepcopy(fresh.state_dict()))
    save({"app": AppState(model, optimizer, options=options)}, checkpoint_id=tmp_path / "c")
    config = {"transforms": [{"kind": "exclude", "keys": ["app.optimizer.*"], "on": "load"}]}
    app = AppState(other, fresh, options=options)
    load({"app": app}, checkpoint_id=tmp_path / "c", config=config)
    assert bits(other) == bits(model)
    assert plain(fresh.state_dict()) == before
