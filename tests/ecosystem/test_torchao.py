"""Quantized weights and small optimizer states of torchao: tensors that are made of others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_pipeline import AppState, LoadMismatchError, load, load_keys, save

pytestmark = pytest.mark.filterwarnings("default")  # the package has its own
WIDTH = 128
"""Below 4096 elements torchao keeps optimizer states as they are."""


@pytest.fixture(autouse=True)
def _present() -> None:
    pytest.importorskip("torchao")


def quantized(seed: int) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 2))
    quantize_(model, Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("by", ["module", "state dict", "app"])
def test_int8_weights(tmp_path: Path, by: str) -> None:
    def state_of(model: nn.Module) -> dict[str, Any]:
        whole = {"module": model, "state dict": model.state_dict(), "app": AppState(model)}
        return {"model": whole[by]}

    saved, loaded = quantized(0), quantized(1)
    inputs = torch.randn(4, WIDTH)
    assert not torch.equal(saved(inputs), loaded(inputs))
    save(state_of(saved), checkpoint_id=tmp_path)
    load(state_of(loaded), checkpoint_id=tmp_path)
    assert torch.equal(saved(inputs), loaded(inputs))
    assert type(loaded[0].weight) is type(saved[0].weight)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert stored < 2 * WIDTH * WIDTH  # bytes, and not floats


def test_int8_weights_do_not_fill_floats(tmp_path: Path) -> None:
    save({"model": quantized(0)}, checkpoint_id=tmp_path)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 2))
    with pytest.raises(LoadMismatchError, match=r"model\.0\.weight\.qdata"):
        load({"model": plain}, checkpoint_id=tmp_path)
    parts = load_keys(tmp_path)["model"]["0.weight"]
    assert parts["qdata"].dtype is torch.int8


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@pytest.mark.parametrize("is_stepped", [True, False])
def test_small_optimizer_states(tmp_path: Path, kind: str, is_stepped: bool) -> None:
    import torchao.optim

    def job(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(WIDTH, WIDTH)
        return model, getattr(torchao.optim, kind)(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            torch.manual_seed(step)
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    # Compiled code is not what is tested, and takes long to compile.
    with torch.compiler.set_stance("force_eager"):
        saved, loaded = job(0), job(1)
        train(*saved, range(2))
        save({"app": AppState(*saved)}, checkpoint_id=tmp_path)
        expected = train(*saved, range(2, 5))
        if is_stepped:
            train(*loaded, range(9, 10))
        load({"app": AppState(*loaded)}, checkpoint_id=tmp_path)
        assert train(*loaded, range(2, 5)) == expected
