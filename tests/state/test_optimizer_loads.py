"""Ways to load an optimizer's state: the helpers, planners of DCP's, a part that is left out."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline import AppState, DefaultLoadPlanner, load, save
from dcp_pipeline.state.helpers import (
    get_state_dict,
    set_state_dict,
)
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
