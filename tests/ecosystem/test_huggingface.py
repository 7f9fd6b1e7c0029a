"""What transformers and peft save, read into sharded models."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from dcp_pipeline import MissingKeyError, load, load_keys
from tests.distributed.pool import Pool
from tests.ecosystem.models import MODELS, sharded

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own
PATIENCE = 200.0
CONFIG = {"layout": "huggingface", "serialization": "safetensors"}


@pytest.fixture(autouse=True)
def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()
    }


def load_sharded(path: Path, name: str, strict: Any) -> dict[str, torch.Tensor]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.manual_seed(7)
    model = MODELS[name]()
    sharded(model)
    load(model.state_dict(), checkpoint_id=path, config=CONFIG | {"strict": strict})
    return whole(model.state_dict())


@pytest.mark.parametrize(("shard_size", "is_one"), [("4KB", False), ("1GB", True)])
def test_a_pretrained_model(ranks: Pool, tmp_path: Path, shard_size: str, is_one: bool) -> None:
    torch.manual_seed(1)
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) == 1) is is_one
    for found in ranks(2).run(load_sharded, tmp_path, "llama", True, seconds=PATIENCE):
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(one, model.state_dict()[name]) for name, one in found.items())


def test_a_tied_embedding_is_not_in_the_files(ranks: Pool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MODELS["tied llama"]()
    model.save_pretrained(tmp_path)
    with pytest.raises(MissingKeyError, match=r"lm_head\.weight"):
        load(model.state_dict(), checkpoint_id=tmp_path, config=CONFIG)
    strict = {"lm_head.weight": False}
    for found in ranks(2).run(load_sharded, tmp_path, "tied llama", strict, seconds=PATIENCE):
        assert all(torch.equal(one, model.state_dict()[name]) for name, one in found.items())


def test_an_adapter_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = MODELS["llama"]()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    read = load_keys(tmp_path, config=CONFIG)
    expected = peft.get_peft_model_state_dict(adapted)
    assert read.keys() == expected.keys() and len(read) == 4
    assert all(torch.equal(one, expected[name]) for name, one in read.items())
