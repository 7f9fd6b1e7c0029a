"""transformers opens what we export; a real model that a package ships goes there and back."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import dcp_pipeline as dcp
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.tools.convert import convert
from tests.distributed.pool import Pool
from tests.ecosystem.models import MODELS, sharded

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own
SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZES))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2,
                                      n_head=2))  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2,
                                      num_attention_heads=2, intermediate_size=24))  # fmt: skip


FAMILIES: dict[str, Callable[[], nn.Module]] = {**MODELS, "qwen3": qwen3, "gpt2": gpt2,
                                                "bert": bert}  # fmt: skip


def export(model: Any, path: Path, **layout: Any) -> None:
    assets = path.parent / "assets"
    model.config.save_pretrained(assets)
    if model.can_generate():
        model.generation_config.save_pretrained(assets)
    config = {"layout": {"kind": "huggingface", "assets": str(assets), **layout}}
    dcp.save(model.state_dict(), checkpoint_id=path, config=config)


def assert_opens(path: Path, wanted: Any) -> None:
    found, report = type(wanted).from_pretrained(path, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[what], (what, report[what])
    assert found.state_dict().keys() == wanted.state_dict().keys()
    for name, tensor in wanted.state_dict().items():
        other = found.state_dict()[name]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor), name


@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
@pytest.mark.parametrize("family", [n for n in FAMILIES if n != "mixtral"])
def test_from_pretrained(tmp_path: Path, family: str, max_shard_size: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(3)
    model = FAMILIES[family]()
    export(model, tmp_path / "exported", max_shard_size=max_shard_size)
    assert_opens(tmp_path / "exported", model)


@pytest.mark.parametrize("max_shard_size", ["5GB", "4KB"])
def test_experts_that_are_fused_at_run_time(tmp_path: Path, max_shard_size: str) -> None:
    """transformers 5 joins Mixtral's experts when it loads; its own files hold one by one."""
    pytest.importorskip("transformers")
    torch.manual_seed(3)
    model: Any = MODELS["mixtral"]()
    model.save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "dcp", to="dcp")
    config = {"layout": {"kind": "huggingface", "assets": str(tmp_path / "own"),
                         "max_shard_size": max_shard_size}}  # fmt: skip
    convert(tmp_path / "dcp", tmp_path / "exported", config=config)
    assert_opens(tmp_path / "exported", model)


def export_sharded(path: Path, family: str, max_shard_size: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(5)
    model = sharded(FAMILIES[family]())
    config = {"layout": {"kind": "huggingface", "assets": str(path.parent / "assets"),
                         "max_shard_size": max_shard_size}}  # fmt: skip
    dcp.save(model.state_dict(), checkpoint_id=path, config=config)


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("tied llama", 2), ("qwen3", 4)])
def test_fsdp2(ranks: Pool, tmp_path: Path, family: str, size: int) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(5)
    model: Any = FAMILIES[family]()
    model.config.save_pretrained(tmp_path / "assets")
    ranks(size).run(export_sharded, tmp_path / "exported", family, "6KB", seconds=200.0)
    assert_opens(tmp_path / "exported", model)


def data_of(package: str, path: str) -> Path:
    """A file of an installed package, which need not be importable."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not there")
    return Path(spec.origin).parent / path


def test_a_real_model(tmp_path: Path) -> None:
    """silero-vad ships its weights as safetensors."""
    file = data_of("silero_vad", "data/silero_vad_16k.safetensors")
    convert(file, tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "mega", to="mega")
    convert(tmp_path / "mega", tmp_path / "hf", to="huggingface", max_shard_size="200KB")
    convert(tmp_path / "hf", tmp_path / "one", to="huggingface")
    with safe_open(file, "pt") as given, safe_open(tmp_path / "one/model.safetensors", "pt") as got:
        assert sorted(given.keys()) == sorted(got.keys())
        for name in given.keys():
            assert torch.equal(given.get_tensor(name), got.get_tensor(name)), name


def test_weights_of_an_old_pickle(tmp_path: Path) -> None:
    """lpips ships state dicts of the format before torch 1.6, which is refused by name."""
    file = data_of("lpips", "weights/v0.1/squeeze.pth")
    with pytest.raises(FormatError, match="which is one pickle; load it with"):
        convert(file, tmp_path / "hf", to="huggingface")
    torch.save(torch.load(file, weights_only=True, map_location="cpu"), tmp_path / "new.pth")
    convert(tmp_path / "new.pth", tmp_path / "hf", to="huggingface")
    wanted = torch.load(file, weights_only=True, map_location="cpu")
    found = dcp.load_keys(tmp_path / "hf", config={"layout": "huggingface"})
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
