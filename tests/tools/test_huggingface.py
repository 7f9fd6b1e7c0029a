"""``inspect``, ``ls``, ``verify`` and ``prune`` on Hugging Face models."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dcp_pipeline as dcp
from dcp_pipeline.tools.inspect import inspect
from dcp_pipeline.tools.listing import list_directory
from dcp_pipeline.tools.opening import State, look, open_directory, state_of
from dcp_pipeline.tools.prune import prune
from dcp_pipeline.tools.verify import verify

STATE = {f"layers.{i}.w": torch.arange(600.0).view(20, 30) + i for i in range(4)}
SIZES = ["5GB", 3000]


def exported(path: Path, max_shard_size: Any = "5GB") -> Path:
    layout = {"kind": "huggingface", "max_shard_size": max_shard_size}
    dcp.save(STATE, checkpoint_id=path, config={"layout": layout})
    return path


@pytest.mark.parametrize("max_shard_size", SIZES)
def test_what_is_well(tmp_path: Path, max_shard_size: Any) -> None:
    report = verify(exported(tmp_path, max_shard_size))
    assert report.is_well and report.kind == "Hugging Face" and report.keys == 4
    assert report.fingerprint == str(dcp.fingerprint(STATE))
    found = inspect(tmp_path)
    assert found.summary.kind == "Hugging Face" and found.summary.tensor_bytes == 9600
    assert str(found.fingerprint) == str(dcp.fingerprint(STATE))
    directory = open_directory(tmp_path)
    assert state_of(directory, look(directory))[0] is State.FOREIGN


@pytest.mark.parametrize("max_shard_size", SIZES)
def test_every_flipped_byte_of_a_tensor_is_found(tmp_path: Path, max_shard_size: Any) -> None:
    exported(tmp_path, max_shard_size)
    for name in sorted(path.name for path in tmp_path.glob("*.safetensors")):
        whole = (tmp_path / name).read_bytes()
        start = int.from_bytes(whole[:8], "little") + 8
        for place in range(start, len(whole), 811):
            changed = bytearray(whole)
            changed[place] ^= 0x10
            (tmp_path / name).write_bytes(changed)
            report = verify(tmp_path)
            (problem,) = report.problems
            number = int(problem.keys[0].split(".")[1])
            assert problem.file == name and place - start < 2400 * (number + 1)
        (tmp_path / name).write_bytes(whole)
    assert verify(tmp_path).is_well


def test_what_others_have_written(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "model").mkdir()
    save_file(STATE, tmp_path / "blobs" / "1")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "blobs" / "1")
    report = verify(tmp_path / "model")
    assert report.is_well and report.fingerprint is None
    assert any("neither a checksum nor a fingerprint" in text for text in report.not_verified)
    (entry,) = list_directory(tmp_path).checkpoints
    assert (entry.name, entry.keys, entry.state) == ("model", 4, State.FOREIGN)
    (tmp_path / "blobs" / "1").write_bytes(b"\1\0\0\0\0\0\0\0{")
    assert not verify(tmp_path / "model").is_well


@pytest.mark.parametrize("is_committed", [True, False])
def test_prune_removes_what_a_killed_export_has_left(tmp_path: Path, is_committed: bool) -> None:
    path = tmp_path / "step-3"
    path.mkdir()
    if is_committed:
        exported(path)
    kept = sorted(entry.name for entry in path.iterdir())
    left = [".model.safetensors.0badcafe.part", f".saving-{'0badcafe' * 4}.json"]
    for name in left:
        (path / name).write_bytes(b"x")
        os.utime(path / name, (time.time() - 9000,) * 2)
    if not is_committed:
        directory = open_directory(path)
        assert state_of(directory, look(directory))[0] is State.INCOMPLETE
    report = prune(tmp_path)
    assert len(report.removed) >= 2
    assert path.exists() == is_committed
    if is_committed:
        assert sorted(entry.name for entry in path.iterdir()) == kept
        assert verify(path).is_well
