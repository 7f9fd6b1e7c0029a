"""Foreign checkpoints through the converter: what comes out is what they held."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcp_pipeline import load_keys
from dcp_pipeline.tools.convert import convert
from tests.foreign.deepspeed_files import write_zero
from tests.foreign.loading import assert_equal
from tests.foreign.snapshot_files import write_snapshot
from tests.foreign.test_dcp_inside import accelerate_folder
from tests.foreign.test_megatron import write as write_megatron

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_zero_3_becomes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    wanted = write_zero(tmp_path / "zero", 3, 3)
    assert convert(tmp_path / "zero", tmp_path / "ours").is_checked
    assert_equal(load_keys(tmp_path / "ours"), wanted)


def test_a_snapshot_becomes_a_checkpoint_of_ours(tmp_path: Path) -> None:
    wanted = write_snapshot(tmp_path / "snapshot")
    convert(tmp_path / "snapshot", tmp_path / "ours", config={"serialization": "safetensors"})
    for name in ("rank0", "rank1"):
        # An empty mapping is no key, which is all that a conversion passes on.
        del wanted[name]["app"]["e"]
    assert_equal(load_keys(tmp_path / "ours"), wanted)


def test_tensor_parallel_ranks_of_megatron_are_fused_by_a_rule(tmp_path: Path) -> None:
    write_megatron(tmp_path / "run", 2, 1)
    name = "model.language_model.layers.0.weight"
    fuse = {
        "kind": "fuse",
        "several": [f"tp{rank}.pp0.{name}" for rank in range(2)],
        "one": name,
        "axis": 0,
    }
    config = {"layout": "huggingface", "serialization": "safetensors", "transforms": [fuse]}
    convert(tmp_path / "run", tmp_path / "hf", config=config, only=[f"tp*.{name}"])
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    expected = torch.cat([torch.zeros(2, 3), torch.full((2, 3), 10.0)])
    assert_equal(load_file(file), {name: expected})


def test_strided_and_tied_tensors_of_torch_save(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {"turned": base.t(), "part": base[1:3, 2:5], "base": base, "tied": base}
    torch.save({**state, "step": 3}, tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "ours")
    assert_equal(load_keys(tmp_path / "ours"), {**state, "step": 3})


def test_the_model_of_an_accelerate_folder(tmp_path: Path) -> None:
    model, _ = accelerate_folder(tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "hf", to="huggingface", only=["model.*"])
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    assert_equal(load_file(file), {f"model.{name}": one for name, one in model.items()})
