"""A model's state by name, whatever is wrapped around it, and on the meta device."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dcp_pipeline import AppState, load, load_keys, save
from dcp_pipeline.core.errors import (
    MissingKeyError,
    ShapeMismatchError,
    StateError,
    UnexpectedKeyError,
)
from dcp_pipeline.state.helpers import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from dcp_pipeline.state.model_names import ModelNames, bare, spellings

NAMES = ["embedding.weight", "layers.0.weight", "layers.0.bias", "scale", "layers.1.running"]
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "data parallel": nn.DataParallel,
    "checkpoint": checkpoint_wrapper,
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.randn(2))
        self.register_buffer("cache", torch.randn(2), persistent=False)


class Model(nn.Module):
    """Has a buffer in the state and one out of it, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), Norm()])
        self.scale = nn.Parameter(torch.randn(()))


def values(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in get_model_state_dict(model).items()}


def wrapped(order: tuple[str, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = Model()
    inner: nn.Module = model.layers[0]
    for name in order:
        inner = WRAPPERS[name](inner)
    model.layers[0] = inner
    outer: nn.Module = model
    for name in order:
        outer = WRAPPERS[name](outer)
    return outer


ORDERS = [order for n in range(4) for order in itertools.permutations(WRAPPERS, n)]


@pytest.mark.parametrize("order", ORDERS, ids=" in ".join)
def test_t62_names_in_any_nesting(tmp_path: Path, order: tuple[str, ...]) -> None:
    model = wrapped(order, 0)
    assert sorted(get_model_state_dict(model)) == sorted(NAMES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    for other_order in ((), order[::-1]):
        other = wrapped(other_order, 1)
        load(
            AppState(other, torch.optim.SGD(other.parameters(), lr=0.1)),
            checkpoint_id=tmp_path / "c",
        )
        assert values(other) == values(model)


@pytest.mark.parametrize("order", ORDERS[1:], ids=" in ".join)
def test_t62_a_checkpoint_with_prefixes(tmp_path: Path, order: tuple[str, ...]) -> None:
    """What was saved of a wrapped model as it is, loads into a plain one, and the other way."""
    model, plain = wrapped(order, 0), wrapped((), 1)
    save({"model": model.state_dict()}, checkpoint_id=tmp_path / "wrapped")
    load({"model": get_model_state_dict(plain)}, checkpoint_id=tmp_path / "wrapped")
    assert values(plain) == values(model)
    load(AppState(wrapped((), 2)), checkpoint_id=tmp_path / "wrapped")
    again = wrapped(order, 3)
    found = set_model_state_dict(again, model.state_dict())
    assert values(again) == values(model) and found == ([], [])
    set_model_state_dict(plain, {f"_orig_mod.module.{k}": v for k, v in plain.state_dict().items()})


def test_modules_that_have_the_names_of_wrappers_children() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)
            self._orig_mod = nn.Linear(1, 1)

    model = torch.compile(Odd())
    names = ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]
    assert list(get_model_state_dict(model)) == names
    other = Odd()
    set_model_state_dict(other, get_model_state_dict(model))
    assert values(other) == values(model)


def test_names_and_spellings() -> None:
    names = ModelNames(nn.DataParallel(torch.compile(nn.Linear(1, 1))))
    for key in ("module._orig_mod.weight", "_orig_mod.weight", "module.weight", "weight"):
        assert names.of(key) == "weight"
    assert bare("a._orig_mod.b._fsdp_wrapped_module.c") == "a.b.c"
    assert spellings(["a.b", "c"], ["module.a.b", "c"]) == {"a.b": "module.a.b"}
    # Not told apart without what wrappers add: both are left alone.
    assert spellings(["b"], ["module.b", "_orig_mod.b"]) == {}


def test_two_entries_of_one_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(1, 1))

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            return found | {key.replace("_orig_mod.", ""): value for key, value in found.items()}

    with pytest.raises(StateError, match=r"inner\.weight"):
        get_model_state_dict(Twice())


class Extra(nn.Module):
    """As TransformerEngine does: bytes that grow."""

    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(self.amount, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amount = len(state)


def test_extra_state() -> None:
    model = nn.Sequential(torch.compile(Extra(3)), nn.Linear(1, 1))
    state = get_model_state_dict(model)
    assert list(state) == ["0._extra_state", "1.weight", "1.bias"]
    other = nn.Sequential(Extra(1), nn.Linear(1, 1))
    set_model_state_dict(other, state)
    assert other[0].amount == 3  # type: ignore[union-attr]


def test_strict() -> None:
    model = Model()
    state = get_model_state_dict(model)
    before = values(model)
    changed = {name: torch.zeros_like(value) for name, value in state.items()}
    del changed["scale"]
    with pytest.raises(MissingKeyError, match="scale") as raised:
        set_model_state_dict(model, changed)
    assert raised.value.missing == ["scale"] and values(model) == before
    with pytest.raises(UnexpectedKeyError, match="more"):
        set_model_state_dict(model, dict(state) | {"more": torch.zeros(1)})
    found = set_model_state_dict(
        model, changed | {"more": torch.zeros(1)}, options=StateDictOptions(strict=False)
    )
    assert found == (["scale"], ["more"])
    assert values(model)["layers.0.bias"] == [0.0, 0.0]
    assert values(model)["scale"] == before["scale"]
    with pytest.raises(ValueError, match="full_state_dict"):
        set_model_state_dict(model, state, options=StateDictOptions(broadcast_from_rank0=True))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["embedding.weight", "layers.0.bias", "scale", "layers.1.running"])
@pytest.mark.parametrize("wrapper", [None, *WRAPPERS])
def test_a_shape_that_does_not_fit(name: str, strict: bool, wrapper: str | None) -> None:
    model = wrapped((wrapper,) if wrapper else (), 0)
    given = get_model_state_dict(wrapped((), 1)) | {name: torch.zeros(5, 5)}
    before = values(model)
    with pytest.raises(ShapeMismatchError, match=name) as raised:
        set_model_state_dict(model, given, options=StateDictOptions(strict=strict))
    assert [shape[0] for shape in raised.value.shapes] == [name]
    assert values(model) == before


class Grows(nn.Module):
    """Takes what has another shape than what it has."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(size))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.empty_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_module_that_takes_other_shapes() -> None:
    model = nn.Sequential(Grows(2), nn.LazyLinear(3))
    given = get_model_state_dict(nn.Sequential(Grows(4), nn.Linear(2, 3)))
    set_model_state_dict(model, given)
    assert model[0].seen.tolist() == [1.0] * 4
    assert model[1].weight.shape == (3, 2)


def test_submodules_and_prefixes() -> None:
    model = Model()
    inner = {model.layers[0]}
    assert list(get_model_state_dict(model, submodules=inner)) == [
        "layers.0.weight",
        "layers.0.bias",
    ]
    short = StateDictOptions(keep_submodule_prefixes=False)
    assert list(get_model_state_dict(model, submodules=inner, options=short)) == ["weight", "bias"]


def test_full_tensors_of_a_model_that_is_not_sharded() -> None:
    model, other = Model(), Model()
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    set_model_state_dict(other, get_model_state_dict(model, options=full), options=full)
    assert values(other) == values(model)
    with pytest.raises(ShapeMismatchError, match="scale"):
        set_model_state_dict(other, values(model) | {"scale": torch.ones(2)}, options=full)


def meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


def test_a_model_on_the_meta_device(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    other = meta(Model)
    parameters = list(other.parameters())
    fresh = torch.optim.AdamW(parameters, lr=0.2)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert values(other) == values(model)
    assert "layers.1.cache" in caplog.text and "layers.1.running" not in caplog.text
    assert all(one is two for one, two in zip(parameters, other.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in parameters)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        two.grad = one.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    fresh.step()
    assert values(other) == values(model)


def test_t70_tied_parameters_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    model = Tied()
    save(AppState(model), checkpoint_id=tmp_path / "c")
    sizes = sum(file.stat().st_size for file in (tmp_path / "c").glob("*.distcp"))
    once = nn.Sequential(nn.Embedding(3, 2))
    save(AppState(once), checkpoint_id=tmp_path / "once")
    assert sizes == sum(f.stat().st_size for f in (tmp_path / "once").glob("*.distcp"))
    for other in (Tied(), meta(Tied)):
        load(AppState(other), checkpoint_id=tmp_path / "c")
        assert other.head.weight is other.embedding.weight
        assert values(other) == values(model)


def test_a_load_that_fails_leaves_a_model_on_the_meta_device(tmp_path: Path) -> None:
    class Refuses:
        def state_dict(self) -> dict[str, int]:
            return {"one": 1}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            raise RuntimeError("not me")

    model = Model()
    save({"refuses": Refuses(), "app": AppState(model)}, checkpoint_id=tmp_path / "c")
    other = Model()
    before = values(other)
    with pytest.raises(Exception, match="not me"):
        load({"refuses": Refuses(), "app": AppState(other)}, checkpoint_id=tmp_path / "c")
    assert values(other) == before


def test_load_keys_gives_nothing_that_was_not_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    state = {"app": AppState(model, torch.optim.AdamW(model.parameters())), "other": {"one": {}}}
    save(state, checkpoint_id=tmp_path / "c")
    assert set(load_keys(tmp_path / "c", ["app.model"])) == {"app"}
    assert set(load_keys(tmp_path / "c", ["app.model"])["app"]) == {"model"}
    found = load_keys(tmp_path / "c")
    assert found["other"] == {"one": {}}
    assert found["app"]["optimizer"]["state"] == {"weight": {}, "bias": {}}
