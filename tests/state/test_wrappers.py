"""Tensors that are made of others, as quantized weights and 8-bit optimizer states are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from dcp_pipeline import AppState, LoadMismatchError, load, save


class Scaled(torch.Tensor):
    """int8 values and a scale per row."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *rest: Any) -> "Scaled":
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def of(cls, values: torch.Tensor) -> "Scaled":
        scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return cls((values / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            fresh = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            args[0].codes.copy_(fresh.codes)
            args[0].scale.copy_(fresh.scale)
            return args[0]
        unwrap = lambda value: value.plain() if isinstance(value, cls) else value  # noqa: E731
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Quantized(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(Scaled.of(torch.randn(4, 3)), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.plain().T + self.bias  # type: ignore[attr-defined,no-any-return]


class Small(torch.optim.Optimizer):
    """Momentum in 8 bits, made at the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = Scaled.of(torch.zeros_like(parameter))
            momentum = state["momentum"].plain() * 0.9 + parameter.grad
            state["momentum"].copy_(Scaled.of(momentum))
            parameter.sub_(0.1 * momentum)


def values(model: Quantized) -> tuple[Any, Any, Any]:
    weight: Any = model.weight
    return weight.codes.tolist(), weight.scale.tolist(), model.bias.tolist()


def train(model: Quantized, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_resume_is_exact(tmp_path: Path, steps: int) -> None:
    model, other = Quantized(0), Quantized(1)
    optimizer, fresh = Small([model.bias]), Small([other.bias])
    for _ in range(steps):
        train(model, optimizer)
    report = save(AppState(model, optimizer), checkpoint_id=tmp_path / "c")
    assert {"model.weight.codes", "model.weight.scale"} <= set(report.state_dict_metadata)
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    assert values(other) == values(model)
    assert isinstance(other.weight, Scaled)
    if steps:
        assert isinstance(fresh.state[other.bias]["momentum"], Scaled)
    for _ in range(2):
        train(model, optimizer)
        train(other, fresh)
    assert values(other) == values(model)
    # And in place, where the state is there.
    load(AppState(other, fresh), checkpoint_id=tmp_path / "c")
    for _ in range(2):
        train(other, fresh)
    assert values(other) == values(model)


def test_weights_that_are_not_quantized(tmp_path: Path) -> None:
    save({"weight": Quantized(0).weight}, checkpoint_id=tmp_path / "c")
    with pytest.raises(LoadMismatchError, match="weight") as raised:
        load({"weight": torch.zeros(4, 3)}, checkpoint_id=tmp_path / "c")
    assert raised.value.missing == ["weight"]
    assert sorted(raised.value.unexpected) == ["weight.codes", "weight.scale"]
