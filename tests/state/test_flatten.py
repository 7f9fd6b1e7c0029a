from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcp_pipeline.core.errors import RollbackFailedError, UnsupportedLeafError
from dcp_pipeline.core.path import Index, dotted
from dcp_pipeline.core.table import Kind
from dcp_pipeline.state.assigning import Undo, assign, delete_at, get_at, put_at
from dcp_pipeline.state.flatten import flatten

ONE = torch.ones(1)


def names(state: Any) -> dict[str, Kind]:
    return {dotted(leaf.path): leaf.kind for leaf in flatten(state).leaves}


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": ONE, "c": 3}, "d": ONE},
        {"l": [ONE, ONE], "m": [1, 2], "n": [{"x": 1}, 2], "o": [[ONE], [3]]},
        {"t": (1, 2), "u": "text", "v": None, "w": [[1], [2]]},
        {"opt": {"param_groups": [{"params": [0, 1], "lr": 0.1}], "state": {0: {"step": ONE}}}},
    ],
    ids=["nested", "lists", "values", "optimizer"],
)
def test_names_are_those_of_dcp(state: dict[str, Any]) -> None:
    wanted, _ = flatten_state_dict(state)
    assert set(names(state)) == set(wanted)


def test_what_is_entered_beyond_dcp() -> None:
    assert names({"t": (ONE, 1), "u": [(ONE,)]}) == {
        "t.0": Kind.TENSOR, "t.1": Kind.VALUE, "u.0.0": Kind.TENSOR}  # fmt: skip
    paths = [leaf.path for leaf in flatten({"t": (ONE,), "l": [ONE], "m": {0: ONE}}).leaves]
    assert paths == [("t", Index(0, True)), ("l", Index(0)), ("m", 0)]


def test_kinds_of_leaves() -> None:
    state = {"a": np.ones(2), "s": np.float32(1), "v": 1.5, "t": ONE, "l": [1, 2]}
    assert list(names(state).values()) == [
        Kind.ARRAY, Kind.SCALAR, Kind.VALUE, Kind.TENSOR, Kind.VALUE]  # fmt: skip


def test_empty_containers_are_kept() -> None:
    flat = flatten({"a": {}, "b": {"c": OrderedDict()}, "l": []})
    assert flat.empty == [(("a",), "dict"), (("b", "c"), "dict")]
    assert [leaf.path for leaf in flat.leaves] == [("l",)]


class Part:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = state_dict


def test_stateful_objects_are_expanded_at_any_depth() -> None:
    inner = Part({"w": ONE})
    outer = Part({"in": inner, "list": [Part({"x": 1})]})
    flat = flatten({"o": outer})
    assert [dotted(leaf.path) for leaf in flat.leaves] == ["o.in.w", "o.list.0.x"]
    assert [dotted(entry.path) for entry in flat.expanded] == ["o", "o.in", "o.list.0"]
    assert [dotted(leaf.path) for leaf in flatten(outer).leaves] == ["in.w", "list.0.x"]


def test_a_state_that_contains_itself() -> None:
    state: dict[str, Any] = {"a": {"b": {}}}
    state["a"]["b"]["c"] = state["a"]
    items: list[Any] = [ONE]
    items.append(Part({"again": items}))
    for value, name in ((state, "a.b.c"), ({"l": items}, "l.1.again")):
        with pytest.raises(UnsupportedLeafError, match=name):
            flatten(value)
    # Twice is not in itself.
    shared = {"x": ONE}
    assert len(flatten({"a": shared, "b": shared}).leaves) == 2


def test_keys_that_cannot_be_stored_are_all_named() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"'a'.*tuple.*'b\.c'.*bytes"):
        flatten({"a": {(1, 2): ONE}, "b": {"c": {b"x": ONE}}})


def test_deep_states() -> None:
    def deep(depth: int) -> Any:
        return ONE if depth == 0 else {"d": deep(depth - 1)}

    assert len(flatten(deep(150)).leaves[0].path) == 150
    with pytest.raises(UnsupportedLeafError):
        flatten(deep(500))


Pair = namedtuple("Pair", "x y")


def state() -> dict[str, Any]:
    return {"d": {"x": 1, "y": {"z": 2}}, "l": [1, {"a": 2}], "t": (1, {"b": 2}), "p": Pair(1, 2),
            "n": None, "e": {}}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (("d", "x"), {"d": {"x": 9, "y": {"z": 2}}}),
        (("d", "y", "z"), {"d": {"x": 1, "y": {"z": 9}}}),
        (("d", "new", "er"), {"d": {"x": 1, "y": {"z": 2}, "new": {"er": 9}}}),
        (("l", Index(0)), {"l": [9, {"a": 2}]}),
        (("l", Index(1), "a"), {"l": [1, {"a": 9}]}),
        (("l", Index(4)), {"l": [1, {"a": 2}, None, None, 9]}),
        (("t", Index(0, True)), {"t": (9, {"b": 2})}),
        (("t", Index(1, True), "b"), {"t": (1, {"b": 9})}),
        (("p", Index(1, True)), {"p": Pair(1, 9)}),
        (("n", "deep", Index(0)), {"n": {"deep": [9]}}),
        (("n", Index(1, True)), {"n": (None, 9)}),
        (("e", 5), {"e": {5: 9}}),
        (("new",), {"new": 9}),
    ],
)
def test_a_value_is_put_in_its_place_and_taken_out_again(
    path: tuple[Any, ...], wanted: dict[str, Any]
) -> None:
    target = state()
    before = {key: id(value) for key, value in target.items()}
    undo = Undo()
    assign(flatten(target), {path: 9}, undo)
    assert target == state() | wanted
    undo.run()
    assert target == state()
    assert {key: id(value) for key, value in target.items()} == before
    assert type(target["p"]) is Pair


def test_many_values_are_taken_back_in_reverse() -> None:
    target: dict[str, Any] = {"l": [], "d": {}, "k": 0}
    undo = Undo()
    values: dict[Any, Any] = {("l", Index(position)): position for position in (3, 1, 0)}
    values |= {("d", str(n), Index(n)): n for n in range(3)} | {("k",): 5}
    assign(flatten(target), values, undo)
    assert target == {"l": [0, 1, None, 3], "k": 5,
                      "d": {"0": [0], "1": [None, 1], "2": [None, None, 2]}}  # fmt: skip
    undo.run()
    assert target == {"l": [], "d": {}, "k": 0}


def test_values_below_a_stateful_object_go_into_what_it_gave() -> None:
    part = Part({"x": 1, "deep": {"y": 2}})
    target = {"part": part}
    flat = flatten(target)
    assign(flat, {("part", "deep", "y"): 9}, Undo())
    assert target["part"] is part and flat.states()["part",] == {"x": 1, "deep": {"y": 9}}


class Stubborn(dict[str, Any]):
    locked = False

    def __setitem__(self, key: str, value: Any) -> None:
        if self.locked:
            raise RuntimeError("locked")
        super().__setitem__(key, value)


def test_a_container_that_cannot_be_put_back_is_told_after_the_rest() -> None:
    stubborn = Stubborn(x=1)
    target = {"first": 1, "stubborn": stubborn, "last": 1}
    undo = Undo()
    assign(flatten(target), {("first",): 2, ("stubborn", "x"): 2, ("last",): 2}, undo)
    stubborn.locked = True
    with pytest.raises(RollbackFailedError, match="locked"):
        undo.run()
    assert (target["first"], target["last"]) == (1, 1)


def test_places_in_nested_containers() -> None:
    tree: dict[Any, Any] = {"kept": {"x": 1}, "none": None}
    put_at(tree, ("kept", "y"), 2)
    put_at(tree, ("made", Index(2), "z"), 3)
    put_at(tree, ("made", Index(0)), 4)
    put_at(tree, ("none", 7, Index(0)), 5)
    put_at(tree, ("kept", "x"), 6)
    assert tree == {
        "kept": {"x": 6, "y": 2}, "made": [4, None, {"z": 3}], "none": {7: [5]},
    }  # fmt: skip
    assert get_at(tree, ()) is tree
    assert get_at(tree, ("made", Index(2), "z")) == 3
    nowhere = [
        ("made", "z"),
        ("made", Index(3)),
        ("kept", Index(0)),
        ("kept", "x", "deep"),
        ("no",),
    ]
    for path in nowhere:
        assert get_at(tree, path) is None
        delete_at(tree, path)
    assert tree["made"] == [4, None, {"z": 3}] and tree["kept"] == {"x": 6, "y": 2}
    for path in [("made", Index(2), "z"), ("made", Index(1)), ("kept", "x"), ("none",)]:
        delete_at(tree, path)
    assert tree == {"kept": {"y": 2}, "made": [4, {}]}
