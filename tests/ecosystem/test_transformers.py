"""Models of transformers, and adapters of peft on them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline import AppState, StateDictOptions, load, load_keys, save
from tests.distributed.pool import Pool
from tests.ecosystem.models import MODELS, Job, sharded

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own
PATIENCE = 200.0  # the packages take long to import


@pytest.fixture(autouse=True)
def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")


def save_and_resume(path: Path, name: str) -> tuple[list[float], list[float]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = Job(MODELS[name], seed=0)
    job.train(0, 2)
    save({"app": job.app()}, checkpoint_id=path)
    resumed = Job(MODELS[name], seed=1)
    load({"app": resumed.app()}, checkpoint_id=path)
    return job.train(2, 4), resumed.train(2, 4)


@pytest.mark.parametrize("name", MODELS)
def test_a_resume_is_exact(ranks: Pool, tmp_path: Path, name: str) -> None:
    for expected, found in ranks(2).run(save_and_resume, tmp_path, name, seconds=PATIENCE):
        assert found == expected


def test_a_tied_embedding_is_stored_once(ranks: Pool, tmp_path: Path) -> None:
    sizes = {}
    for name in ("llama", "tied llama"):
        ranks(2).run(save_and_resume, tmp_path / name, name, seconds=PATIENCE)
        stored = load_keys(tmp_path / name, ["app.model"])["app"]["model"]
        assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"]) is (
            name == "tied llama"
        )
        files = (tmp_path / name).glob("*.distcp")
        sizes[name] = sum(file.stat().st_size for file in files)
    assert sizes["tied llama"] < sizes["llama"]


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    found = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    sharded(found.base_model.model)
    return found


def save_and_resume_adapters(path: Path) -> tuple[list[float], list[float]]:
    options = StateDictOptions(ignore_frozen_params=True)
    job = Job(MODELS["llama"], seed=0, prepare=adapted)
    job.train(0, 2)
    save({"app": AppState(job.model, job.optimizer, options=options)}, checkpoint_id=path)
    resumed = Job(MODELS["llama"], seed=0, prepare=adapted)
    resumed.train(7, 8)
    load({"app": AppState(resumed.model, resumed.optimizer, options=options)}, checkpoint_id=path)
    return job.train(2, 4), resumed.train(2, 4)


def test_adapters_over_a_frozen_base(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    for expected, found in ranks(2).run(save_and_resume_adapters, tmp_path, seconds=PATIENCE):
        assert found == expected
    stored = load_keys(tmp_path, ["app.model"])["app"]["model"]
    assert len(stored) == 8
    assert all(".lora_" in name for name in stored)
