"""Load semantics: T57, T60, T61, T63, and U10, U11 of the counted faults."""

import errno
import io
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcp_pipeline.core.errors import (
    DtypeMismatchError,
    LoadMismatchError,
    MissingKeyError,
    ShapeMismatchError,
    UnexpectedKeyError,
)
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.types.exceptions import CheckpointException
from tests.cases.jobs import pipeline_of
from tests.distributed.pool import Pool
from tests.equal import assert_same, bits

KINDS = ["torch_save", "safetensors"]


def round_trip(state: Any, template: Any, path: Path, **config: Any) -> Any:
    with pipeline_of(config) as pipeline:
        pipeline.save(state, path)
        pipeline.load(template, path)
    return template


# T57: all differences in one error.

SAVED = {
    "model": {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4), "extra": torch.ones(1)},
    "optimizer": {"step": torch.ones(1), "lr": 0.1},
}


def wanted() -> dict[str, Any]:
    model = {"a": torch.zeros(2), "b": torch.zeros(5), "c": torch.zeros(4).half()}
    return {"model": model | {"m1": torch.zeros(1), "m2": torch.zeros(1)},
            "optimizer": {"step": torch.zeros(1), "lr": 0.0}}  # fmt: skip


def test_t57_all_five_differences_are_in_one_error(tmp_path: Path) -> None:
    with pipeline_of() as pipeline:
        pipeline.save(SAVED, tmp_path)
        template = wanted()
        with pytest.raises(LoadMismatchError) as caught:
            pipeline.load(template, tmp_path)
    error = caught.value
    assert isinstance(error, CheckpointException)
    assert error.missing == ["model.m1", "model.m2"]
    assert error.unexpected == ["model.extra"]
    assert [tuple(entry) for entry in error.shapes] == [("model.b", [3], [5])]
    assert [tuple(entry) for entry in error.dtypes] == [("model.c", "float32", "float16")]
    for name in ("m1", "m2", "extra", "model.b", "model.c"):
        assert name in str(error)
    assert_same(template, wanted())


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"new": torch.zeros(1)}, MissingKeyError),
        ({"a": torch.zeros(3)}, ShapeMismatchError),
        ({"a": torch.zeros(2, 1)}, ShapeMismatchError),
        ({"a": torch.zeros(())}, ShapeMismatchError),
        ({"a": torch.zeros(2, dtype=torch.float64)}, DtypeMismatchError),
        ({"a": 3}, DtypeMismatchError),
        ({"n": torch.zeros(2)}, DtypeMismatchError),
        ({"a": np.zeros(2)}, DtypeMismatchError),
        ({"a": np.zeros(3, np.float32)}, ShapeMismatchError),
    ],
)
def test_t57_one_kind_of_difference_has_its_own_error(
    tmp_path: Path, change: dict[str, Any], kind: type[LoadMismatchError]
) -> None:
    with pipeline_of() as pipeline:
        pipeline.save({"a": torch.ones(2), "n": 1}, tmp_path)
        with pytest.raises(kind, match=next(iter(change))) as caught:
            pipeline.load({"a": torch.zeros(2), "n": 1} | change, tmp_path)
    assert isinstance(caught.value, KeyError) == (kind is MissingKeyError)


def test_t57_a_key_that_nobody_wants(tmp_path: Path) -> None:
    with pipeline_of() as pipeline:
        pipeline.save({"a": {"x": 1, "y": 2}, "b": {"z": 3}}, tmp_path)
        with pytest.raises(UnexpectedKeyError) as caught:
            pipeline.load({"a": {"x": 0}}, tmp_path)
        assert caught.value.unexpected == ["a.y"]
        # A whole section that is not asked for is no accident.
        assert pipeline.load({"a": {"x": 0, "y": 0}}, tmp_path).not_requested == ["b.z"]


def test_t57_a_lenient_load_gives_the_lists(tmp_path: Path) -> None:
    with pipeline_of({"strict": False}) as pipeline:
        pipeline.save(SAVED, tmp_path)
        template = wanted()
        report = pipeline.load(template, tmp_path)
    assert report.missing == ["model.m1", "model.m2"]
    assert report.unexpected == ["model.extra"]
    assert report.shapes == [("model.b", [3], [5])]
    assert report.dtypes == [("model.c", "float32", "float16")]
    assert report.loaded == ["model.a", "optimizer.lr", "optimizer.step"]
    expected = wanted()
    expected["model"]["a"], expected["optimizer"] = torch.ones(2), SAVED["optimizer"]
    assert_same(template, expected)


def test_t57_the_optimizer_stays_strict_when_the_model_is_lenient(tmp_path: Path) -> None:
    with pipeline_of({"strict": {"model": False}}) as pipeline:
        pipeline.save(SAVED, tmp_path)
        template = wanted()
        template["optimizer"]["momentum"] = torch.zeros(1)
        with pytest.raises(MissingKeyError) as caught:
            pipeline.load(template, tmp_path)
        assert caught.value.missing == ["optimizer.momentum"]
        del template["optimizer"]["momentum"]
        assert pipeline.load(template, tmp_path).missing == ["model.m1", "model.m2"]


def load_with_keys(path: Path, keys: list[list[str]]) -> None:
    with pipeline_of() as pipeline:
        pipeline.load({key: torch.zeros(2) for key in keys[dist.get_rank()]}, path)


def test_t57_differences_of_all_ranks_are_gathered(ranks: Pool, tmp_path: Path) -> None:
    Pipeline().save({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path)
    for failure in ranks(2).fail(load_with_keys, tmp_path, [["a", "x"], ["b", "y"]]):
        assert failure.missing == ["x", "y"] and failure.unexpected == ["c"]


# T60, U10: keys and containers.

Point = namedtuple("Point", "x y")

STATES: dict[str, Any] = {
    "empty containers": {"a": {}, "b": [], "c": (), "d": {"e": {}, "f": [[], {}]}},
    "dotted beside nested": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    "three ways to one name": {"a.b.c": 1, "a": {"b.c": 2, "b": {"c": 3}}, "a.b": {"c": 4}},
    "int beside text": {0: torch.ones(1), "0": torch.zeros(1)},
    "int beside text, values": {"m": {1: "int", "1": "text", 1.5: "float", "1.5": "text"}},
    "int keys": {"nested": {1: 5}, 7: torch.ones(2), "text": torch.ones(1)},
    "none and bool keys": {"m": {None: 1, True: 2, "None": 3, "True": 4}},
    "list beside int keys": {"l": [torch.ones(1)], "m": {0: torch.ones(1)}},
    "empty key": {"": torch.ones(1), "a": {"": 2}},
    "odd keys": {"a/b": 1, "..": 2, "a#1": 3, "ü\n": 4, "#": {"#": 5}},
    "suffix taken": {"a.b": 1, "a": {"b": 2}, "a.b#1": 3},
    "deep": {"a": [{"b": [{"c": [torch.ones(2), {"d": (torch.ones(1), 2)}]}]}]},
    "values": {"i": 3, "f": 1.5, "b": True, "n": None, "s": "text", "y": b"\0\1", "c": 1 + 2j,
               "l": [1, "a", [2.0, None]], "t": (1, (2,)), "big": 1 << 80,
               "inf": float("inf"), "set": {1, "a"}},
    "tuples of tensors": {"t": (torch.ones(2), (torch.zeros(1), "x")), "p": [(torch.ones(1),)]},
    "0-dim and empty": {"z": torch.tensor(3.0), "e": torch.empty(0), "f": torch.empty(2, 0, 3)},
    "numpy": {"a": np.arange(4.0), "s": np.float32(1.5), "z": np.array(3), "e": np.zeros((0, 2))},
}  # fmt: skip


@pytest.mark.parametrize("serialization", KINDS)
@pytest.mark.parametrize("name", STATES)
def test_t60_u10_a_state_comes_back_as_it_went_in(
    tmp_path: Path, name: str, serialization: str
) -> None:
    state = STATES[name]
    for template in ({}, blank(state), dict.fromkeys(state)):
        found = round_trip(state, template, tmp_path, serialization=serialization)
        assert_same(ordered(found), ordered(state))


def blank(value: Any) -> Any:
    """The same containers and tensors with other values."""
    if isinstance(value, dict):
        return {key: blank(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(blank, value))
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, (np.ndarray, np.generic)):
        return np.full_like(value, 9) if isinstance(value, np.ndarray) else type(value)(9)
    return "other"


def ordered(value: Any) -> Any:
    """Mappings by their keys: a load adds new keys at the end."""
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value, key=repr)}
    if isinstance(value, (list, tuple)):
        return type(value)(map(ordered, value))
    return value


def test_t60_containers_are_filled_in_place(tmp_path: Path) -> None:
    state = {"d": {"x": torch.ones(1)}, "l": [torch.ones(1), {"y": 2}], "o": OrderedDict(a=1, b=2)}
    template: Any = {"d": {}, "l": [], "o": OrderedDict()}
    before = {key: id(value) for key, value in template.items()}
    round_trip(state, template, tmp_path)
    assert_same(template, state)
    assert {key: id(value) for key, value in template.items()} == before


def test_a_template_of_another_structure_is_a_difference(tmp_path: Path) -> None:
    with pipeline_of() as pipeline:
        pipeline.save({"0": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path)
        with pytest.raises(LoadMismatchError) as caught:
            pipeline.load({"0": torch.zeros(1), "a": {"c": torch.zeros(1)}}, tmp_path)
    assert (caught.value.missing, caught.value.unexpected) == (["a.c"], ["a.b"])


def test_named_tuples_come_back_as_they_are(tmp_path: Path) -> None:
    first, second = torch.zeros(2), torch.zeros(1)
    template = {"p": Point(first, second)}
    round_trip({"p": Point(torch.ones(2), torch.full((1,), 2.0))}, template, tmp_path)
    assert isinstance(template["p"], Point) and template["p"].x is first
    assert_same(list(template["p"]), [torch.ones(2), torch.full((1,), 2.0)])


def test_the_names_of_a_state_do_not_depend_on_its_order(tmp_path: Path) -> None:
    state = {"a.b": 1, "a": {"b": 2}, "0": 3, 0: 4}
    with pipeline_of() as pipeline:
        names = [
            set(pipeline.save(dict(items), tmp_path / str(n)).manifest.names)
            for n, items in enumerate((state.items(), reversed(state.items())))
        ]
    assert names[0] == names[1] and len(names[0]) == 4


# U11: a lenient load keeps what is not there.


class Custom:
    pass


@pytest.mark.parametrize("strict", [False, {"kept": False}])
def test_u11_a_lenient_load_keeps_what_the_checkpoint_lacks(tmp_path: Path, strict: Any) -> None:
    kept = {"object": Custom(), "set": {1, 2}, "array": np.arange(3), "tensor": torch.ones(2),
            "none": None, "list": [1], "empty": {}, "stream": io.BytesIO(b"x")}  # fmt: skip
    template = {"w": torch.zeros(1), "kept": dict(kept)}
    with pipeline_of({"strict": strict}) as pipeline:
        pipeline.save({"w": torch.ones(1)}, tmp_path)
        report = pipeline.load(template, tmp_path)
    assert template["kept"].keys() == kept.keys()
    assert all(template["kept"][key] is value for key, value in kept.items())
    assert report.missing == [f"kept.{key}" for key in kept if key != "empty"]
    assert template["w"].item() == 1.0


# T61: Stateful objects.


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, scheduler


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> None:
    for at in range(number):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(at))).square().sum().backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("serialization", KINDS)
def test_t61_objects_stay_the_same_and_a_second_resume_is_bit_equal(
    tmp_path: Path, serialization: str
) -> None:
    names = ("model", "optimizer", "scheduler")
    unbroken = trained(1)
    step(*unbroken, 2)
    with pipeline_of({"serialization": serialization}) as pipeline:
        pipeline.save(dict(zip(names, unbroken, strict=True)), tmp_path / "1")
        for resume in (1, 2):
            resumed = trained(7)
            # An optimizer makes its state in its first step.
            step(*resumed, 1)
            state = dict(zip(names, resumed, strict=True))
            parameters = [id(parameter) for parameter in resumed[0].parameters()]
            pipeline.load(state, tmp_path / str(resume))
            assert all(state[name] is part for name, part in zip(names, resumed, strict=True))
            assert [id(parameter) for parameter in resumed[0].parameters()] == parameters
            step(*unbroken, 2)
            step(*resumed, 2)
            for one, other in zip(resumed, unbroken, strict=True):
                assert_same(one.state_dict(), other.state_dict())
            pipeline.save(state, tmp_path / str(resume + 1))


# T63: meta tensors.


def on_meta(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_meta(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_meta, value))
    return value.to("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_t63_a_meta_template_becomes_cpu_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    ones = torch.ones(2, dtype=dtype)
    matrix = torch.arange(6).reshape(2, 3).to(dtype)
    state = {"m": {"w": matrix, "l": [ones], "t": (ones,)}, "s": torch.tensor(1, dtype=dtype)}
    template = on_meta(state)
    assert_same(round_trip(state, template, tmp_path), state)


def test_t63_a_meta_tensor_cannot_be_saved(tmp_path: Path) -> None:
    with pipeline_of() as pipeline, pytest.raises(TypeError, match=r"m\.w.*meta"):
        pipeline.save({"m": {"w": torch.empty(2, device="meta")}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pipeline_of() as pipeline, pytest.raises(FileNotFoundError) as caught:
            pipeline.load({"w": torch.zeros(1)}, path)
        assert caught.value.errno == errno.ENOENT and str(path) in str(caught.value)
    assert bits(torch.zeros(1)).sum() == 0
