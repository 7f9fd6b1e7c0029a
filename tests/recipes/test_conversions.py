"""Conversions by the maps of recipes, on ranks: torchtitan to Hugging Face to torchtitan."""

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_pipeline as dcp
from dcp_pipeline.config.compose import compose
from dcp_pipeline.tools.convert import convert
from tests.distributed.pool import Pool
from tests.marks import mostly_slow
from tests.recipes.shrunken import overrides, small
from tests.recipes.test_maps import state_of

MAP = "torchtitan_to_huggingface"
MODELS = ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3", "mixtral_8x7b"]


def there_and_back(path: Path, name: str, kind: str) -> tuple[str | None, str | None]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {
        key: distribute_tensor(tensor, mesh, [Shard(number % tensor.dim())])
        for number, (key, tensor) in enumerate(state_of(small(name), "torchtitan").items())
    }
    dcp.save(state, checkpoint_id=path / "titan")
    config = compose([*overrides(name), f"recipe.map={MAP}"], name).config
    there = convert(path / "titan", path / "other", to=kind, config=config)
    back = convert(path / "other", path / "back", to="dcp", config=config, reverse=True)
    return there.fingerprint, back.fingerprint


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    mostly_slow(
        [(name, kind, size) for name in MODELS for kind in ("huggingface", "mega")
         for size in (1, 2, 4)],
        [("llama3_8b", "huggingface", 2), ("qwen3_30b_a3b", "huggingface", 4),
         ("deepseek_v3", "mega", 1)],
    ),
)  # fmt: skip
def test_there_and_back(ranks: Pool, tmp_path: Path, name: str, kind: str, size: int) -> None:
    found = ranks(size).run(there_and_back, tmp_path, name, kind)
    state = state_of(small(name), "torchtitan")
    assert {back for _, back in found} == {str(dcp.fingerprint(state))}
    again = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(again, checkpoint_id=tmp_path / "back")
    assert all(torch.equal(again[key], tensor) for key, tensor in state.items())
    shapes = {key: shape for key, (_, shape) in small(name).tensors("huggingface").items()}
    stored = dcp.load_keys(tmp_path / "other", config={"layout": kind})
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == shapes
