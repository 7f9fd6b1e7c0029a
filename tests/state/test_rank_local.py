"""``RankLocal`` in one process; several ranks are in ``tests/cases/test_rank_local.py``."""

import copy
import io
import logging
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import dcp_pipeline
from dcp_pipeline import AppState, RankLocal
from dcp_pipeline.core.errors import (
    LoadMismatchError,
    MissingKeyError,
    StateError,
    UnexpectedKeyError,
    UnsupportedLeafError,
    WorldSizeMismatchError,
)
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.state.rank_locals import KINDS, Loader, Outer, load, ordered, save

Point = namedtuple("Point", "x y")


VALUES: dict[str, Any] = {
    "nothing": None,
    "a number": 3,
    "text": "x",
    "bytes": b"\0\1",
    "a great number": 1 << 200,
    "no dict": {},
    "no list": [],
    "no tuple": (),
    "a tensor": torch.arange(6).reshape(2, 3),
    "a scalar": torch.tensor(2.5, dtype=torch.bfloat16),
    "no elements": torch.empty(0, 3),
    "an array": np.arange(4, dtype=np.uint32),
    "a NumPy scalar": np.float32(1.5),
    "a list of tensors": [torch.ones(2), torch.zeros(1)],
    "a tuple of tensors": (torch.ones(2), 4),
    "plain values": {"a": [1, (2, 3)], "b": {"c": {}}, "d": None, 4: "int", "4": "text"},
    "mixed": {"a": [{"t": torch.ones(3)}, {}], "b": ({"t": torch.ones(2)}, None)},
    "dotted": {"a.b": 1, "a": {"b": 2}},
    "looks like ours": {"rank-0-of-1": {"rank-3-of-9": 1}, "rank-1-of-1": torch.ones(1)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["nothing", "a number", "a tensor", "mixed", "plain values"])
@pytest.mark.parametrize("name", VALUES)
def test_whatever_is_there_becomes_what_was_saved(
    tmp_path: Path, name: str, other: str, kind: str
) -> None:
    save({"own": RankLocal(VALUES[name])}, tmp_path, kind)
    template = {"own": RankLocal(copy.deepcopy(VALUES[other]))}
    report = load(template, tmp_path, kind)
    assert_same(ordered(template["own"].value), ordered(VALUES[name]))
    assert report.is_verified and not report.resized and not report.unexpected
    shown = dcp_pipeline.load_keys(tmp_path, config={"serialization": kind})
    assert_same(ordered(shown["own"]["rank-0-of-1"]), ordered(VALUES[name]))


def test_a_stream(tmp_path: Path) -> None:
    save({"own": RankLocal({"s": io.BytesIO(b"abc")})}, tmp_path)
    template = {"own": RankLocal(None)}
    load(template, tmp_path)
    assert template["own"].value["s"].getvalue() == b"abc"


def test_what_fits_is_filled_in_place(tmp_path: Path) -> None:
    state = {
        "dict": OrderedDict(a=1),
        "list": [torch.ones(2), {"x": 1}],
        "tensor": nn.Parameter(torch.ones(3)),
        "view": torch.ones(6)[::2],
        "array": np.ones(3),
        "point": Point(torch.ones(1), 2),
    }
    save({"own": RankLocal(state)}, tmp_path)
    memory = torch.zeros(6)
    here = {
        "dict": OrderedDict(b=2),
        "list": [torch.zeros(2), {}, 5],
        "tensor": nn.Parameter(torch.zeros(3)),
        "view": memory[::2],
        "array": np.zeros(3),
        "point": Point(torch.zeros(1), 0),
        "gone": 1,
    }
    before = dict(here)
    own = RankLocal(here)
    load({"own": own}, tmp_path)
    assert own.value is here and "gone" not in here
    assert all(here[name] is before[name] for name in here if name != "point")
    assert here["dict"] == OrderedDict(a=1) and type(here["dict"]) is OrderedDict
    assert torch.equal(here["list"][0], torch.ones(2)) and here["list"][1:] == [{"x": 1}]
    assert here["tensor"].requires_grad and here["tensor"].tolist() == [1.0] * 3
    assert memory.tolist() == [1.0, 0.0] * 3
    assert here["array"].tolist() == [1.0] * 3
    assert here["point"] == Point(torch.ones(1), 2) and type(here["point"]) is Point


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [0, 1, 3])
@pytest.mark.parametrize("here", [0, 2, 3])
def test_a_state_that_changes_its_structure(
    tmp_path: Path, kind: str, saved: int, here: int
) -> None:
    save({"data": RankLocal(Loader(saved))}, tmp_path, kind)
    loader = Loader(here)
    own = RankLocal(loader)
    load({"data": own}, tmp_path, kind)
    assert own.value is loader and loader.position == saved


@pytest.mark.parametrize(
    "nest",
    [
        lambda value: {"own": RankLocal(value)},
        lambda value: {"deep": {"er": [{"own": RankLocal(value)}]}},
        lambda value: {"tuple": (torch.ones(1), RankLocal(value))},
        lambda value: {"object": Outer(own=RankLocal(value), other=1)},
        lambda value: {"object": Outer(inner=Outer(own=RankLocal(value)))},
        lambda value: {"own": RankLocal(Outer(inner=value))},
        lambda value: {"own": RankLocal(Outer(inner=Outer(inner=value), x=torch.ones(2)))},
        lambda value: {"own": RankLocal({"list": [value, 1], "x": torch.ones(2)})},
        lambda value: {"one": RankLocal(value), "two": RankLocal(value)},
        lambda value: {"app": AppState(nn.Linear(2, 2), own=RankLocal(value))},
        lambda value: RankLocal(value),
    ],
)
def test_anywhere_in_a_state(tmp_path: Path, nest: Any) -> None:
    save(nest(Loader(3)), tmp_path)
    loader = Loader(1)
    state = nest(loader)
    load(state, tmp_path)
    assert loader.position == 3
    # And it can be done again, with what is there now.
    save(state, tmp_path)
    load(state, tmp_path)


def test_an_object_that_makes_one_anew_each_time(tmp_path: Path) -> None:
    class Sampler:
        position = 5

        def state_dict(self) -> dict[str, Any]:
            return {"own": RankLocal({"at": self.position})}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["own"].value["at"]

    save({"sampler": Sampler()}, tmp_path)
    sampler = Sampler()
    sampler.position = 1
    load({"sampler": sampler}, tmp_path)
    assert sampler.position == 5


# What does not fit.


def test_saved_without(tmp_path: Path) -> None:
    for plain in (torch.ones(2), 3, {"at": 3}, {}, Loader(2)):
        save({"data": plain, "x": 1}, tmp_path)
        own = RankLocal({"at": 1})
        with pytest.raises(LoadMismatchError, match=r"data .*saved without RankLocal") as caught:
            load({"data": own, "x": 0}, tmp_path)
        assert caught.value.missing == ["data"] and own.value == {"at": 1}


def test_not_saved_at_all(tmp_path: Path) -> None:
    save({"x": 1}, tmp_path)
    with pytest.raises(MissingKeyError) as caught:
        load({"data": RankLocal(1), "x": 0}, tmp_path)
    assert caught.value.missing == ["data"] and "without RankLocal" not in str(caught.value)
    assert load({"data": RankLocal(1), "x": 0}, tmp_path, strict=False).missing == ["data"]


def test_loaded_without(tmp_path: Path) -> None:
    save({"data": RankLocal({"at": 3}), "x": 1}, tmp_path)
    for plain in ({"at": 1}, torch.ones(2), 3, Loader(2)):
        with pytest.raises(LoadMismatchError, match="no RankLocal there") as caught:
            load({"data": plain, "x": 0}, tmp_path)
        assert caught.value.unexpected == ["data.rank-0-of-1.at"]
    with pytest.raises(UnexpectedKeyError, match="no RankLocal there"):
        load({"data": {"rank-0-of-1": {}, "z": {}}, "x": 0} | {"data": {"z": {}}}, tmp_path)
    assert load({"x": 0}, tmp_path).not_requested == ["data.rank-0-of-1.at"]


def test_an_empty_template_shows_the_mapping(tmp_path: Path) -> None:
    save({"data": RankLocal({"at": 3})}, tmp_path)
    for empty in ({}, None):
        template = {"data": empty}
        load(template, tmp_path)
        assert template["data"] == {"rank-0-of-1": {"at": 3}}


def test_a_mapping_made_by_hand_is_taken(tmp_path: Path) -> None:
    save({"data": {f"rank-{n}-of-2": {"at": n} for n in range(2)} | {"rank-0-of-1": 7}}, tmp_path)
    own = RankLocal(None)
    load({"data": own}, tmp_path)
    assert own.value == 7


def test_an_object_that_was_not_saved(tmp_path: Path) -> None:
    save({"own": RankLocal({"a": Loader(2), "n": 1})}, tmp_path)
    state = {"own": RankLocal({"a": Loader(1), "b": Loader(1)})}
    with pytest.raises(MissingKeyError) as caught:
        load(state, tmp_path)
    assert caught.value.missing == ["own.rank-0-of-1.b"]


def test_another_number_of_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = {f"rank-{n}-of-3": {"at": n, "t": torch.ones(n)} for n in range(3)}
    save({"a": stored, "b": stored, "c": {"d": stored}, "x": 1}, tmp_path)

    def state(*rules: Any) -> dict[str, Any]:
        a, b, d = (RankLocal({"at": -1}, on_resize=rule) for rule in rules)
        return {"a": a, "b": b, "c": {"d": d}, "x": 0}

    template = state("error", "fresh", "error")
    with pytest.raises(WorldSizeMismatchError, match="3 ranks have saved, 1 load") as caught:
        load(template, tmp_path)
    assert isinstance(caught.value, StateError)
    assert caught.value.world_sizes == [("a", 3, 1), ("c.d", 3, 1)]
    assert template["x"] == 0 and template["a"].value == {"at": -1}

    template = state("fresh", "first", "first")
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        report = load(template, tmp_path)
    assert report.resized == [("a", 3, 1), ("b", 3, 1), ("c.d", 3, 1)]
    assert template["a"].value == {"at": -1} and template["b"].value["at"] == 0
    assert template["c"]["d"].value["at"] == 0 and template["x"] == 1
    kept, first = sorted(record.getMessage() for record in caplog.records)[::-1]
    assert "keeps its own a" in first + kept and "first has saved of b, c.d" in first + kept
    # The state must not be lost on the way to the memory of another rank.
    assert not report.unexpected and not report.missing

    template = state("error", "error", "error")
    report = load(template, tmp_path, strict=False)
    assert len(report.resized) == 3 and template["a"].value == {"at": -1}
    assert template["x"] == 1


def test_world_sizes_come_with_all_other_differences(tmp_path: Path) -> None:
    save({"a": {"rank-0-of-3": 1}, "w": torch.ones(2), "z": {"q": 1}}, tmp_path)
    with pytest.raises(LoadMismatchError) as caught:
        load({"a": RankLocal(0), "w": torch.ones(3), "y": 1, "z": {"p": {}}}, tmp_path)
    error = caught.value
    assert not isinstance(error, WorldSizeMismatchError)
    assert error.world_sizes == [("a", 3, 1)] and error.missing == ["y"]
    assert error.unexpected == ["z.q"] and len(error.shapes) == 1


def test_first_is_the_first_that_saved(tmp_path: Path) -> None:
    save({"a": {"rank-2-of-4": "two", "rank-3-of-4": "three"}}, tmp_path)
    own = RankLocal(None, on_resize="first")
    load({"a": own}, tmp_path)
    assert own.value == "two"


# What is refused.


def test_a_rule_that_is_none() -> None:
    with pytest.raises(ValueError, match="error, fresh, first, found 'last'"):
        RankLocal(1, on_resize="last")  # type: ignore[arg-type]


def test_one_in_another(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="RankLocal in a RankLocal"):
        RankLocal(RankLocal(1))
    late = RankLocal(1)
    late.value = RankLocal(2)
    for value in ({"a": RankLocal(1)}, [RankLocal(1)], Outer(a=RankLocal(1)), late):
        with pytest.raises(UnsupportedLeafError, match="RankLocal inside another one"):
            save({"own": late if value is late else RankLocal(value)}, tmp_path)
    assert not list(tmp_path.iterdir())


def make_dtensor(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
    dcp_pipeline.save({"own": RankLocal({"t": tensor})}, checkpoint_id=path)


def test_a_tensor_of_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    for failure in ranks(2).fail(make_dtensor, tmp_path):
        assert "own.rank-0-of-2.t" in failure.message
        assert "a DTensor in a RankLocal" in failure.message


def test_values_that_cannot_be_stored(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"own.rank-0-of-1.a"):
        save({"own": RankLocal({"a": object()})}, tmp_path)


def test_its_memory_is_shared_with_nothing_that_all_ranks_have(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    saved = save({"w": weight, "own": RankLocal([weight, weight])}, tmp_path)
    aliases = [spec.alias for spec in saved.manifest.table.keys]
    assert aliases == [-1, -1, 1]


# Plain DCP.


def test_plain_dcp_reads_it(tmp_path: Path) -> None:
    save({"own": RankLocal({"at": 3, "t": torch.ones(2)})}, tmp_path)
    state = {"own": {"rank-0-of-1": {"at": 0, "t": torch.zeros(2)}}}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_same(state["own"]["rank-0-of-1"], {"at": 3, "t": torch.ones(2)})


def test_plain_dcp_saves_and_loads_it(tmp_path: Path) -> None:
    dcp.save({"own": RankLocal(Loader(2))}, checkpoint_id=tmp_path)
    loader = Loader(2)
    dcp.load({"own": RankLocal(loader)}, checkpoint_id=tmp_path)
    loader = Loader(1)
    load({"own": RankLocal(loader)}, tmp_path)
    assert loader.position == 2


def test_a_planner_of_dcp(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner()
    dcp_pipeline.save({"own": RankLocal({"at": 3})}, checkpoint_id=tmp_path, planner=planner)
    own = RankLocal({"at": 0})
    dcp_pipeline.load({"own": own}, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner())
    assert own.value == {"at": 3}
    with pytest.raises(MissingKeyError, match="no value for rank-0-of-1, only for rank-0-of-2"):
        own.load_state_dict({"rank-0-of-2": 1})


def test_it_says_what_it_holds() -> None:
    assert repr(RankLocal(3, "first")) == "RankLocal(3, on_resize='first')"
