"""Modules that stand in a state as they are: their names, memory, and ways of their own."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

from dcp_pipeline import AppState, CheckpointError, RankLocal, fingerprint, load, load_keys, save
from tests.marks import slow

Wrap = Callable[[nn.Module], Any]

WRAPPERS: dict[str, Wrap] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel": DataParallel,
    "recomputed": checkpoint_wrapper,
    "averaged": AveragedModel,
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda model: model,
    "list": lambda model: [1, model],
    "mapping": lambda model: {"deep": {"model": model}},
    "one rank's": RankLocal,
    "app": lambda model: AppState(nn.Identity(), copy=model),
}


MARKED = [name if name in ("itself", "one rank's") else slow(name) for name in PLACES]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def values(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in (*model.parameters(), *model.buffers())]


def wrapped(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model = WRAPPERS[name](model)
    return model


def bare(model: nn.Module) -> nn.Module:
    """The module in all wrappers."""
    while not isinstance(model, nn.Sequential):
        (model,) = model.children()
    return model


@pytest.mark.parametrize("place", MARKED)
@pytest.mark.parametrize("outer", WRAPPERS)
def test_names_of_wrappers_are_taken_off(tmp_path: Path, place: str, outer: str) -> None:
    for inner in WRAPPERS:
        if "averaged" in (outer, inner) or outer == inner:
            continue  # an average has a value of its own; torch compiles once
        model = wrapped(net(0), inner, outer)
        plain = net(1)
        save({"it": PLACES[place](model)}, checkpoint_id=tmp_path / inner)
        load({"it": PLACES[place](plain)}, checkpoint_id=tmp_path / inner)
        assert values(plain) == values(model)
        other = wrapped(net(2), outer, inner)
        load({"it": PLACES[place](other)}, checkpoint_id=tmp_path / inner)
        assert values(other) == values(model)
        assert fingerprint({"it": PLACES[place](other)}) == fingerprint(
            {"it": PLACES[place](plain)}
        )


@pytest.mark.parametrize("place", MARKED)
def test_an_average_of_weights(tmp_path: Path, place: str) -> None:
    average = AveragedModel(net(0))
    for seed in (1, 2):
        average.update_parameters(net(seed))
    save({"it": PLACES[place](average)}, checkpoint_id=tmp_path / "c")
    for wrap in ([], ["compiled"], ["recomputed", "compiled"]):
        other = AveragedModel(wrapped(net(7), *wrap))
        load({"it": PLACES[place](other)}, checkpoint_id=tmp_path / "c")
        assert values(bare(other.module)) == values(average.module)
        assert other.n_averaged == 2


def test_an_average_is_found_by_the_plain_model(tmp_path: Path) -> None:
    average = AveragedModel(net(0))
    save({"model": average, "app": AppState(average)}, checkpoint_id=tmp_path / "c")
    one, two = net(1), net(2)
    lenient = {"strict": False}  # it has no use for the count
    load({"model": one, "app": AppState(two)}, checkpoint_id=tmp_path / "c", config=lenient)
    assert values(one) == values(two) == values(average.module)


def test_an_average_of_averages_keeps_both_counts(tmp_path: Path) -> None:
    inner = AveragedModel(net(0))
    inner.update_parameters(net(1))
    outer = AveragedModel(inner)
    other = AveragedModel(AveragedModel(net(2)))
    state = {"raw": outer, "app": AppState(outer)}
    save(state, checkpoint_id=tmp_path / "c")
    load({"raw": other, "app": AppState(other)}, checkpoint_id=tmp_path / "c")
    assert values(other) == values(outer)


def test_names_that_were_saved_with_those_of_wrappers(tmp_path: Path) -> None:
    for outer, inner in itertools.permutations(WRAPPERS, 2):
        if "averaged" in (outer, inner):
            continue  # has a value of its own
        model = wrapped(net(0), inner, outer)
        dcp.save({"it": dict(model.state_dict())}, checkpoint_id=tmp_path / f"{outer} {inner}")
        plain = net(1)
        load({"it": plain}, checkpoint_id=tmp_path / f"{outer} {inner}")
        assert values(plain) == values(model)


def test_a_module_without_wrappers_goes_both_ways_with_plain_dcp(tmp_path: Path) -> None:
    model, ours, theirs = net(0), net(1), net(2)
    save({"it": model}, checkpoint_id=tmp_path / "ours")
    dcp.load({"it": theirs}, checkpoint_id=tmp_path / "ours")
    dcp.save({"it": model}, checkpoint_id=tmp_path / "theirs")
    load({"it": ours}, checkpoint_id=tmp_path / "theirs")
    assert values(ours) == values(theirs) == values(model)


def test_dcps_planner_gets_the_same_names(tmp_path: Path) -> None:
    model, plain = wrapped(net(0), "compiled"), net(1)
    save({"it": model}, checkpoint_id=tmp_path / "c", planner=dcp.DefaultSavePlanner())
    other = wrapped(net(2), "recomputed")
    load({"it": other}, checkpoint_id=tmp_path / "c", planner=dcp.DefaultLoadPlanner())
    load({"it": plain}, checkpoint_id=tmp_path / "c")
    assert values(plain) == values(other) == values(model)


def test_a_name_of_the_users_own_stays(tmp_path: Path) -> None:
    own = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
    save({"it": wrapped(own, "compiled")}, checkpoint_id=tmp_path / "c")
    assert sorted(load_keys(tmp_path / "c")["it"]) == [
        "_orig_mod.bias", "_orig_mod.weight", "module.bias", "module.weight",
    ]  # fmt: skip
    other = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})
    load({"it": other}, checkpoint_id=tmp_path / "c")
    assert values(other) == values(own)


class OwnWay(nn.Module):
    """Gives what no module gives."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), number))
        self.seen: list[str] = []

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"nested": {"weight": self.weight.detach()}, 3: "three"}

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        assert state_dict[3] == "three"
        self.seen.append("loaded")
        with torch.no_grad():
            self.weight.copy_(state_dict["nested"]["weight"])


def test_a_module_with_a_state_of_its_own_kind(tmp_path: Path) -> None:
    save({"it": OwnWay(1.0)}, checkpoint_id=tmp_path / "c")
    other = OwnWay(2.0)
    load({"it": other}, checkpoint_id=tmp_path / "c")
    assert other.weight.tolist() == [1.0, 1.0]
    assert other.seen == ["loaded"]


@pytest.mark.parametrize("place", MARKED)
def test_a_module_on_the_meta_device_gets_memory(tmp_path: Path, place: str) -> None:
    model = net(0)
    save({"it": PLACES[place](model)}, checkpoint_id=tmp_path / "c")
    for names in ((), ("compiled",), ("recomputed", "parallel")):
        with torch.device("meta"):
            empty = net(1)
        parameters = list(empty.parameters())
        load({"it": PLACES[place](wrapped(empty, *names))}, checkpoint_id=tmp_path / "c")
        assert values(empty) == values(model)
        assert all(one is two for one, two in zip(parameters, empty.parameters(), strict=True))


def test_what_stays_on_the_meta_device_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"it": net(0)}, checkpoint_id=tmp_path / "c")
    with torch.device("meta"):
        empty = net(1)
        empty.register_buffer("mask", torch.zeros(2), persistent=False)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load({"it": empty}, checkpoint_id=tmp_path / "c")
    assert "mask" in caplog.text
    assert "weight" not in caplog.text


class Refuses:
    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        raise ValueError("no")


@pytest.mark.parametrize("names", [(), ("compiled",), ("parallel", "compiled"), ("averaged",)])
@pytest.mark.parametrize("place", MARKED)
def test_a_load_that_fails_leaves_them(tmp_path: Path, place: str, names: tuple[str, ...]) -> None:
    state = {"bad": Refuses(), "it": PLACES[place](wrapped(net(0), *names))}
    save(state, checkpoint_id=tmp_path / "c")
    other = wrapped(net(1), *names)
    before = values(other)
    with pytest.raises(CheckpointError, match="no"):
        load({"bad": Refuses(), "it": PLACES[place](other)}, checkpoint_id=tmp_path / "c")
    assert values(other) == before
