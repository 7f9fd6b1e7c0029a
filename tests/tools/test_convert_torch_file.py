"""Conversions into one file that torch.load opens."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_pipeline as dcp
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    ChecksumError,
    ConfigError,
    UnsupportedLeafError,
)
from dcp_pipeline.tools import convert_check
from dcp_pipeline.tools.convert import convert
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.memory import begin_peak, needs_peak, peak


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    found = {"w": torch.randn(6, 5), "half": torch.randn(9).bfloat16(), "zero": torch.zeros(0, 2)}
    for name, size in ITEM_SIZES.items():
        bits = torch.randint(0, 2, (4 * size,)).to(torch.uint8)
        found[name] = bits.view(DTYPES[name])
    return found


def loaded(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def test_one_file_with_everything_in_it(tmp_path: Path) -> None:
    state = {"model": tensors(), "step": 3, "lr": 0.1, "none": None}
    saved = dcp.save(state, checkpoint_id=tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "out" / "model.pt", to="torch_save")
    assert os.listdir(tmp_path / "out") == ["model.pt"]
    wanted = {f"model.{name}": tensor for name, tensor in tensors().items()}
    assert_same(
        loaded(tmp_path / "out" / "model.pt"), wanted | {"step": 3, "lr": 0.1, "none": None}
    )
    assert (done.target_kind, done.is_checked) == ("torch_save", True)
    assert done.target == str(tmp_path / "out" / "model.pt")
    assert done.fingerprint == str(saved.manifest.fingerprint)


def test_what_is_tied_is_stored_once_and_shared_again(tmp_path: Path) -> None:
    one = torch.randn(1000, 100)
    dcp.save({"embed": one, "head": one}, checkpoint_id=tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "m.pt", to="torch_save")
    assert (tmp_path / "m.pt").stat().st_size < 1.1 * one.nbytes
    found = loaded(tmp_path / "m.pt")
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert torch.equal(found["head"], one)


def test_rules_and_choices(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3), "n": 1},
        checkpoint_id=tmp_path / "a",
    )
    rules = [
        {"kind": "rename", "keys": {"a": "x", "b": "y"}},
        {"kind": "transpose", "keys": ["x"]},
    ]
    done = convert(
        tmp_path / "a", tmp_path / "m.pt", to="torch_save", drop=["n"], dtype="bfloat16",
        config={"transforms": rules}, plan_only=True,
    )  # fmt: skip
    assert not (tmp_path / "m.pt").exists() and done.target_kind == "torch_save"
    convert(
        tmp_path / "a", tmp_path / "m.pt", to="torch_save", drop=["n"], dtype="bfloat16",
        config={"transforms": rules},
    )  # fmt: skip
    wanted = {
        "x": torch.arange(6.0).view(2, 3).t().contiguous().bfloat16(),
        "y": torch.ones(3).bfloat16(),
    }
    assert_same(loaded(tmp_path / "m.pt"), wanted)


def test_values_that_torch_would_refuse(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "raw": b"", "kinds": frozenset((1,)), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    with pytest.raises(
        UnsupportedLeafError, match=r"2 values: 'raw', a bytes, 'kinds', a frozenset"
    ):
        convert(tmp_path / "a", tmp_path / "m" / "m.pt", to="torch_save")
    assert not (tmp_path / "m").exists()
    convert(tmp_path / "a", tmp_path / "m.pt", to="torch_save", drop=["raw", "kinds"])
    assert loaded(tmp_path / "m.pt")["step"] == 3


def test_the_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    target = tmp_path / "out" / "m.pt"
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    dcp.save(
        {"w": torch.arange(9000.0)}, checkpoint_id=tmp_path / "b", config={"fingerprint": False}
    )
    convert(tmp_path / "a", target, to="torch_save")
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "b", target, to="torch_save", config={"overwrite": "error"})
    (target.parent / "other.txt").write_text("stays")
    (data,) = (tmp_path / "b").glob("*.distcp")
    good = data.read_bytes()
    data.write_bytes(good[:20_000] + bytes([good[20_000] ^ 1]) + good[20_001:])
    with pytest.raises(ChecksumError, match=data.name):
        convert(tmp_path / "b", target, to="torch_save")
    assert sorted(os.listdir(target.parent)) == ["m.pt", "other.txt"]
    assert loaded(target)["w"].tolist() == [1.0, 1.0]
    data.write_bytes(good)
    convert(tmp_path / "b", target, to="torch_save")
    assert sorted(os.listdir(target.parent)) == ["m.pt", "other.txt"]
    assert torch.equal(loaded(target)["w"], torch.arange(9000.0))


def test_what_was_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "a")
    check = convert_check.check_target

    def flipped(*arguments: Any) -> None:
        data = bytearray((tmp_path / "m.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "m.pt").write_bytes(data)
        check(*arguments)

    monkeypatch.setattr("dcp_pipeline.tools.convert.check_target", flipped)
    with pytest.raises(ChecksumError, match="'w' was not written as it was read"):
        convert(tmp_path / "a", tmp_path / "m.pt", to="torch_save")


@pytest.mark.parametrize("target", ["", "out/", "out", "."])
def test_the_target_is_a_file(tmp_path: Path, target: str) -> None:
    (tmp_path / "out").mkdir()
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"the path of a file, such as model\.pt"):
        convert(tmp_path / "a", f"{tmp_path}/{target}", to="torch_save")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save({"w": torch.ones(2), "nan": math.nan}, checkpoint_id=tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "a", "model.pt", "--to", "torch_save"])
    assert not stopped.value.code
    assert loaded(tmp_path / "model.pt")["w"].tolist() == [1.0, 1.0]


def on_ranks(path: Path) -> list[Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state: dict[str, Any] = {
        "w": distribute_tensor(torch.arange(40.0).view(8, 5), mesh, [Shard(0)])
    }
    dcp.save({**state, "raw": b""}, checkpoint_id=path / "a")
    done = convert(path / "a", path / "out" / "m.pt", to="torch_save", drop=["raw"])
    try:
        convert(path / "a", path / "out" / "m.pt", to="torch_save")
    except UnsupportedLeafError as error:
        return [done.fingerprint, done.is_checked, str(error)]
    return []


def test_one_rank_writes_and_all_hear_of_it(ranks: Pool, tmp_path: Path) -> None:
    found = ranks(2).run(on_ranks, tmp_path)
    state = {"w": torch.arange(40.0).view(8, 5)}
    for fingerprint, is_checked, error in found:
        assert fingerprint == str(dcp.fingerprint(state)) and is_checked
        assert "rank 0" in error and "'raw', a bytes" in error
    assert os.listdir(tmp_path / "out") == ["m.pt"]
    assert_same(loaded(tmp_path / "out" / "m.pt"), state)


@needs_peak
def test_the_state_is_never_in_memory(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((12, 1 << 20), float(n)) for n in range(4)}  # 48 MiB each
    dcp.save(state, checkpoint_id=tmp_path / "a")
    del state
    dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "small")
    convert(tmp_path / "small", tmp_path / "small.pt", to="torch_save")  # what is made once
    before = begin_peak()
    config = {"storage": {"thread_count": 1}}
    convert(tmp_path / "a", tmp_path / "m.pt", to="torch_save", memory="64MiB", config=config)
    assert peak() - before < 64 << 20
    found = torch.load(tmp_path / "m.pt", weights_only=True, mmap=True)
    assert [found[f"w{n}"][11, -1].item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]
