"""Recipes against transformers itself: names, shapes, and outputs of models that were mapped."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dcp_pipeline as dcp
from tests.recipes.make_names import NAMES, saved
from tests.recipes.shrunken import SHRUNKEN, small, transformers_model

pytestmark = pytest.mark.filterwarnings("default")  # the package has its own


@pytest.fixture(autouse=True)
def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")


@pytest.mark.parametrize("name", SHRUNKEN)
def test_names_and_shapes(name: str) -> None:
    found = saved(transformers_model(name))
    assert found == json.loads((NAMES / f"{name}.json").read_text())
    assert found == {key: list(shape) for key, (_, shape) in small(name).tensors().items()}


def test_the_demos_model_is_a_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    from model import Decoder

    torch.manual_seed(0)
    ours = Decoder(width=16, depth=2, heads=4, context=32).eval()
    recipe = small("tiny_decoder")
    rules = recipe.rules("demo_to_huggingface")
    dcp.save(dict(ours.state_dict()), checkpoint_id=tmp_path, config={"transforms": rules})
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_embd=16, n_head=4, n_positions=32, vocab_size=256, bos_token_id=1,
            eos_token_id=2, activation_function="gelu", tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    theirs.load_state_dict(dcp.load_keys(tmp_path))
    text = torch.randint(0, 256, (2, 32))
    with torch.no_grad():
        assert torch.allclose(theirs(text).logits, ours(text), atol=1e-5)


def test_berts_encoder_is_torchs(tmp_path: Path) -> None:
    bert: Any = transformers_model("bert").eval()
    state = {key: tensor for key, tensor in bert.state_dict().items() if ".decoder." not in key}
    dcp.save(state, checkpoint_id=tmp_path)
    layer = nn.TransformerEncoderLayer(16, 4, 64, activation="gelu", batch_first=True)
    layer.norm1.eps = layer.norm2.eps = 1e-12
    torchs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    found = {f"encoder.{key}": tensor for key, tensor in torchs.state_dict().items()}
    rules = small("bert").rules("torch_to_huggingface")
    dcp.load(
        found,
        checkpoint_id=tmp_path,
        config={"transforms": rules, "strict": {"bert": False, "cls": False}},
    )
    hidden = torch.randn(2, 5, 16)
    with torch.no_grad():
        theirs = bert.bert.encoder(hidden).last_hidden_state
        assert torch.allclose(torchs(hidden), theirs, atol=1e-5)
