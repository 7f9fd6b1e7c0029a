"""Kinds with plain DCP inside.

The tensors are written by torch's own DCP, folders and other files as torchtitan, Accelerate and
Megatron-core lay them out; ``tests/ecosystem/test_foreign.py`` has the latter two write themselves.
"""

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as plain_save

from dcp_pipeline import save
from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    UnsafeCheckpointError,
)
from dcp_pipeline.layout.foreign import recognize
from tests.equal import assert_same
from tests.foreign.loading import assert_equal, load_foreign, nested, opened
from tests.foreign.pretended import pretended

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def plain(path: Path, state: dict[str, Any]) -> None:
    plain_save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def test_ours_and_plain_dcp(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).view(2, 3), "step": 3}
    save(dict(state), checkpoint_id=tmp_path / "ours")
    plain(tmp_path / "plain", dict(state))
    plain_save(
        dict(state), storage_writer=FileSystemWriter(tmp_path / "alone"), no_dist=True,
        use_collectives=False,
    )  # fmt: skip
    for name in ("ours", "plain", "alone"):
        assert recognize(str(tmp_path / name)) == "dcp"
        assert_equal(nested(tmp_path / name), state)


def test_torchtitan_opens_the_newest_committed_step(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        plain(tmp_path / f"step-{step}", {"norm.weight": torch.full((2,), float(step))})
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / "__0_0.distcp").write_bytes(b"half")
    assert recognize(str(tmp_path)) == "torchtitan"
    assert_same(nested(tmp_path), {"norm.weight": torch.full((2,), 10.0)})
    one = nested(tmp_path / "step-5", "torchtitan")
    assert_same(one, {"norm.weight": torch.full((2,), 5.0)})
    for step in (5, 9, 10):
        (tmp_path / f"step-{step}" / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match="none with a committed checkpoint"):
        opened(tmp_path)


def accelerate_folder(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.ones(2)}
    optimizer = {
        "state": {
            name: {"exp_avg": one * 2, "step": torch.tensor(4.0)} for name, one in model.items()
        },
        "param_groups": [{"lr": 0.1, "params": list(model)}],
    }
    plain(path / "pytorch_model_fsdp_0", {"model": dict(model)})
    plain(path / "optimizer_0", {"optimizer": optimizer})
    return model, optimizer


def test_accelerate_is_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model, optimizer = accelerate_folder(tmp_path)
    plain(tmp_path / "pytorch_model_fsdp_1", {"model": {"w": torch.zeros(3)}})
    (tmp_path / "scheduler.bin").write_bytes(b"not read")
    assert recognize(str(tmp_path)) == "accelerate"
    wanted = {"model": model, "optimizer": optimizer, "model_1": {"w": torch.zeros(3)}}
    assert_equal(nested(tmp_path), wanted)
    template = {"model": {name: torch.empty_like(one) for name, one in model.items()}}
    load_foreign(template, tmp_path)
    assert_same(template, {"model": model})
    assert "optimizer_0/__0_0.distcp" in [entry.name for entry in opened(tmp_path).files]


def test_accelerate_with_other_keys_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "pytorch_model_fsdp_0", {"elsewhere": {"w": torch.zeros(3)}})
    with pytest.raises(FormatError, match=r"pytorch_model_fsdp_0 holds 'elsewhere\.w'"):
        opened(tmp_path)


def test_accelerate_with_a_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    save({"model": {"w": torch.zeros(3)}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0")
    with pytest.raises(
        FormatError, match="pytorch_model_fsdp_0 holds a checkpoint of this package"
    ):
        opened(tmp_path)


def megatron_dist(path: Path, backend: str = "torch_dist") -> dict[str, Any]:
    tensors = {"decoder.layers.weight": torch.arange(12.0).view(2, 2, 3)}
    plain(path, dict(tensors))
    (path / "metadata.json").write_text(
        json.dumps({"sharded_backend": backend, "sharded_backend_version": 1})
    )
    common = {"iteration": 5, "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16)}
    torch.save(common, path / "common.pt")
    return {**tensors, "iteration": 5, "args": {"lr": 0.1, "dtype": torch.bfloat16}}


def test_megatron_torch_dist(tmp_path: Path) -> None:
    wanted = megatron_dist(tmp_path)
    assert recognize(str(tmp_path)) == "megatron_dist"
    assert_equal(nested(tmp_path), wanted)


def test_megatron_torch_dist_of_a_run(tmp_path: Path) -> None:
    wanted = megatron_dist(tmp_path / "iter_0000012")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert_equal(nested(tmp_path), wanted)
    assert_equal(nested(tmp_path, "megatron_dist"), wanted)


def test_plans_in_the_metadata_are_passed_over(tmp_path: Path) -> None:
    wanted = megatron_dist(tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.all_local_plans = [SavePlan([WriteItem(index, WriteItemType.SHARD)])]
    metadata.mcore_data = {"decoder.layers.weight": {"nd_reformulated_orig_global_shape": (2,)}}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_equal(nested(tmp_path), wanted)


class MCoreMetadata(Metadata):
    pass


class MCoreSavePlan(SavePlan):
    pass


def test_metadata_of_older_megatron(tmp_path: Path) -> None:
    wanted = megatron_dist(tmp_path)
    old = MCoreMetadata(**vars(pickle.loads((tmp_path / ".metadata").read_bytes())))
    old.all_local_plans = [MCoreSavePlan([])]
    name = "megatron.core.dist_checkpointing.strategies.torch"
    with pretended(name, MCoreMetadata, MCoreSavePlan):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(old))
    assert_equal(nested(tmp_path), wanted)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    megatron_dist(tmp_path / "a", "zarr")
    with pytest.raises(FormatError, match="backend 'zarr'"):
        opened(tmp_path / "a")
    megatron_dist(tmp_path / "b")
    (tmp_path / "b" / "__0_0.distcp").unlink()
    with pytest.raises(MissingFileError, match=r"__0_0\.distcp"):
        opened(tmp_path / "b")
    megatron_dist(tmp_path / "c")
    torch.save({"f": print}, tmp_path / "c" / "common.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"common\.pt.*builtins\.print"):
        opened(tmp_path / "c")
