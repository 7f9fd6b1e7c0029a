"""Conversions between layouts, by one process and by ranks: values, rules, faults."""

import os
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_pipeline as dcp
from dcp_pipeline.core.errors import (
    ChecksumError,
    ConfigError,
    LoadMismatchError,
    RuleError,
    UnsupportedLeafError,
)
from dcp_pipeline.tools import convert_check
from dcp_pipeline.tools.convert import Conversion, convert
from tests.distributed.pool import Pool
from tests.marks import mostly_slow, slow

KINDS = ["dcp", "huggingface", "mega"]
RULES: list[dict[str, Any]] = [
    {"kind": "rotary", "keys": ["*.wq"], "head_dim": 4},
    {"kind": "fuse", "from": ["layers.{i}.w1", "layers.{i}.w3"], "to": "model.layers.{i}.gate_up"},
    {"kind": "stack", "from": "layers.{i}.experts.{e}", "to": "model.layers.{i}.experts",
     "over": "e"},
    {"kind": "transpose", "keys": ["*.gate_up"]},
    {"kind": "rename", "keys": {"layers.{i}.wq": "model.layers.{i}.q_proj.weight",
                                "embed": "model.embed"}},
]  # fmt: skip


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found = {"embed": torch.randn(50, 16).bfloat16()}
    for i in range(3):
        found[f"layers.{i}.wq"] = torch.randn(8, 16)
        found[f"layers.{i}.w1"] = torch.randn(24, 16)
        found[f"layers.{i}.w3"] = torch.randn(24, 16)
        for e in range(4):
            found[f"layers.{i}.experts.{e}"] = torch.randint(0, 99, (5, 7))
    return found


def mapped() -> dict[str, torch.Tensor]:
    """What the rules make of :func:`state`, by torch."""
    given = state()
    made = {"model.embed": given["embed"]}
    for i in range(3):
        pairs = given[f"layers.{i}.wq"].view(2, 2, 2, 16)
        made[f"model.layers.{i}.q_proj.weight"] = pairs.transpose(1, 2).reshape(8, 16)
        made[f"model.layers.{i}.gate_up"] = torch.cat(
            [given[f"layers.{i}.w1"], given[f"layers.{i}.w3"]]
        ).t()
        made[f"model.layers.{i}.experts"] = torch.stack(
            [given[f"layers.{i}.experts.{e}"] for e in range(4)]
        )
    return made


def read(path: Path, kind: str, names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in names.items()}
    dcp.load(found, checkpoint_id=path, config={"layout": kind})
    return found


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_every_pair_of_kinds(tmp_path: Path) -> None:
    """There and back over every other kind: the same values, the same fingerprint."""
    given = state()
    dcp.save(given, checkpoint_id=tmp_path / "start")
    wanted = str(dcp.fingerprint(given))
    for first in KINDS:
        done = convert(tmp_path / "start", tmp_path / first, to=first)
        assert (done.source_kind, done.target_kind, done.is_checked) == ("dcp", first, True)
        assert done.fingerprint == wanted and done.nbytes == sum(t.nbytes for t in given.values())
        for second in KINDS:
            again = convert(tmp_path / first, tmp_path / f"{first}-{second}", to=second)
            assert again.fingerprint == wanted and again.source_kind == first
            assert_same(read(tmp_path / f"{first}-{second}", second, given), given)


@pytest.mark.parametrize("kind", KINDS)
def test_rules_there_and_back(tmp_path: Path, kind: str) -> None:
    given = state()
    dcp.save(given, checkpoint_id=tmp_path / "a")
    there = convert(tmp_path / "a", tmp_path / "b", to=kind, config={"transforms": RULES})
    assert_same(read(tmp_path / "b", kind, mapped()), mapped())
    key = next(key for key in there.keys if key.name == "model.layers.1.gate_up")
    assert key.sources == ("layers.1.w1", "layers.1.w3") and key.rules == ("fuse", "transpose")
    back = convert(tmp_path / "b", tmp_path / "c", config={"transforms": RULES}, reverse=True)
    assert_same(read(tmp_path / "c", "dcp", given), given)
    assert back.fingerprint == str(dcp.fingerprint(given))


def on_ranks(path: Path, kind: str) -> list[str | None]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    given = {name: distribute_tensor(tensor, mesh, [Shard(number % 2)])
             for number, (name, tensor) in enumerate(state().items())}  # fmt: skip
    dcp.save(given, checkpoint_id=path / "a")
    rules = {"transforms": RULES}
    there = convert(path / "a", path / "b", to=kind, config=rules)
    back = convert(path / "b", path / "c", config=rules, reverse=True)
    return [there.fingerprint, back.fingerprint]


@pytest.mark.parametrize(
    ("kind", "size"),
    mostly_slow(product(KINDS, [2, 4]), [("dcp", 2), ("huggingface", 2), ("mega", 4)]),
)
def test_on_ranks(ranks: Pool, tmp_path: Path, size: int, kind: str) -> None:
    found = ranks(size).run(on_ranks, tmp_path, kind)
    assert len({tuple(prints) for prints in found}) == 1
    assert found[0][1] == str(dcp.fingerprint(state()))
    assert_same(read(tmp_path / "b", kind, mapped()), mapped())
    assert_same(read(tmp_path / "c", "dcp", state()), state())


def test_what_takes_part(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": state(), "optimizer": {"lr": 0.1, "m": torch.ones(3)}, "n": 1}
    dcp.save(given, checkpoint_id=tmp_path / "a")
    with pytest.raises(UnsupportedLeafError, match=r"'optimizer\.lr' is no tensor"):
        convert(tmp_path / "a", tmp_path / "x", to="huggingface")
    done = convert(tmp_path / "a", tmp_path / "b", to="huggingface", drop=["optimizer", "n"])
    assert {key.name for key in done.keys} == {f"model.{name}" for name in state()}
    done = convert(tmp_path / "a", tmp_path / "c", to="dcp", only=["optimizer.*", "n"])
    assert dcp.load_keys(tmp_path / "c").keys() == {"optimizer", "n"} and len(done.keys) == 3
    assert dcp.load_keys(tmp_path / "c")["optimizer"]["lr"] == 0.1
    with pytest.raises(ConfigError, match="no key of the source matches 'modle'"):
        convert(tmp_path / "a", tmp_path / "x", only=["modle"])
    with pytest.raises(ConfigError, match="no key of the source is left"):
        convert(tmp_path / "a", tmp_path / "x", only=["n"], drop=["n"])
    assert not (tmp_path / "x").exists() or list((tmp_path / "x").iterdir()) == []


def test_another_dtype(tmp_path: Path) -> None:
    given = state() | {"big": torch.tensor([1e30, 2.0])}
    dcp.save(given, checkpoint_id=tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", to="huggingface", dtype="float16")
    wanted = {n: t.half() if t.is_floating_point() else t for n, t in given.items()}
    assert_same(read(tmp_path / "b", "huggingface", wanted), wanted)
    assert done.casts == {"big": 1}


def test_an_average(tmp_path: Path) -> None:
    parts = [{"w": torch.randn(20, 5), "b": torch.randn(4).bfloat16(), "n": torch.tensor(k),
              "d": torch.randn(3, dtype=torch.float64)} for k in range(3)]  # fmt: skip
    paths = [tmp_path / str(n) for n in range(3)]
    for path, part in zip(paths, parts, strict=True):
        dcp.save(part, checkpoint_id=path)
    for weights in (None, [0.5, 0.25, 0.25], [2.0, -1.0, 0.0]):
        convert(paths, tmp_path / "mean", to="dcp", weights=weights)
        found = dcp.load_keys(tmp_path / "mean")
        for name, wide in {"w": torch.float32, "b": torch.float32, "d": torch.float64}.items():
            shares = weights or [1 / 3] * 3
            total = torch.zeros_like(parts[0][name], dtype=wide)
            for share, part in zip(shares, parts, strict=True):
                total.add_(part[name].to(wide), alpha=share)
            assert torch.equal(found[name], total.to(parts[0][name].dtype)), name
        assert found["n"] == 0
    dcp.save({"w": torch.ones(3), "x": torch.ones(1)}, checkpoint_id=tmp_path / "other")
    with pytest.raises(LoadMismatchError) as caught:
        convert([*paths, tmp_path / "other"], tmp_path / "y", to="dcp")
    for word in ("lacks b, n, d", "has x besides", "and w of another shape"):
        assert word in str(caught.value)
    with pytest.raises(ConfigError, match="2 weights are given for 3 sources"):
        convert(paths, tmp_path / "y", weights=[1.0, 2.0])


def test_what_rules_forget(tmp_path: Path) -> None:
    """T71: everything in one error, and nothing is written."""
    dcp.save(state() | {"layers.7.w1": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(RuleError) as caught:
        convert(tmp_path / "a", tmp_path / "b", to="dcp", config={"transforms": RULES[:-1]})
    for line in (
        "no rule takes 'embed'",
        "fuse: 'model.layers.7.gate_up' lacks 'layers.7.w3'",
    ):
        assert line in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_a_plan(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", to="mega", config={"transforms": RULES},
                   plan_only=True)  # fmt: skip
    assert {k.name: (getattr(torch, str(k.dtype)), k.shape) for k in done.keys} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in mapped().items()
    }
    assert done.fingerprint is None and not (tmp_path / "b").exists()


def test_what_was_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "a")
    whole = convert_check.tensor_fingerprints

    def flipped(*args: Any) -> dict[str, str]:
        with (tmp_path / "b" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            (last,) = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return whole(*args)

    monkeypatch.setattr(convert_check, "tensor_fingerprints", flipped)
    with pytest.raises(ChecksumError, match=r"'layers\.2\.experts\.3' was not written"):
        convert(tmp_path / "a", tmp_path / "b", to="huggingface")
    assert not convert(tmp_path / "a", tmp_path / "b", to="huggingface", check=False).is_checked


def test_a_source_that_was_changed(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "a", config={"layout": "huggingface"})
    raw = bytearray((tmp_path / "a" / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "a" / "model.safetensors").write_bytes(raw)
    with pytest.raises(ChecksumError, match=r"'layers\.2\.experts\.3' is not what"):
        convert(tmp_path / "a", tmp_path / "b", to="dcp")


RUN = """
import os, signal, sys
from dcp_pipeline.pipelines import resumption
from dcp_pipeline.tools.convert import convert
resumption.UNIT_BYTES = resumption._SMALLEST_BYTES = 40_000
source, target, kind, stop = sys.argv[1:]
def progress(done, total):
    if stop != "never" and done > float(stop) * total:
        os.kill(os.getpid(), signal.SIGKILL)
done = convert(source, target, to=kind, progress=progress,
               config={"storage": {"thread_count": 1}})
print(done.fingerprint)
"""


def big() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"w{n}": torch.randn(100, 100) for n in range(12)}


@pytest.mark.parametrize("kind", [slow("dcp"), "huggingface", slow("mega")])
def test_it_goes_on_after_a_kill(tmp_path: Path, kind: str) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    dcp.save(big(), checkpoint_id=source)

    def run(stop: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RUN, str(source), str(target), kind, stop]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    killed = run("0.6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = sorted(target.rglob("*"))
    assert kept
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"w0": torch.zeros(100, 100)}, checkpoint_id=target, config={"layout": kind})
    # What is finished is not written anew, or else it would be killed again. The checksums of MEGA
    # are taken first, from what is read once more.
    again = run("1.6" if kind == "mega" else "0.6")
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == str(dcp.fingerprint(big()))
    assert_same(read(target, kind, big()), big())
    assert not [path for path in target.iterdir() if path.name.endswith((".tmp", ".part"))]


def test_without_resumption_nothing_is_left(tmp_path: Path) -> None:
    dcp.save(big(), checkpoint_id=tmp_path / "a")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for resume, target in ((True, tmp_path / "b"), (False, tmp_path / "c")):
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "a", target, to="huggingface", progress=stop, resume=resume)
        assert bool(list(target.iterdir())) == resume
    done = convert(tmp_path / "a", tmp_path / "b", to="huggingface")
    assert done.fingerprint == str(dcp.fingerprint(big()))
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model.safetensors"]


def test_bad_arguments(tmp_path: Path) -> None:
    dcp.save(big(), checkpoint_id=tmp_path / "a")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "hugginface"}, "allowed: dcp, huggingface, mega"),
        ({"memory": "1MiB"}, "at least 64MiB for each of the 2 threads"),
        ({"memory": "lots"}, "expected bytes"),
        ({"to": "dcp", "max_shard_size": "1GB"}, "max_shard_size"),
        ({"to": "dcp", "dtype": "float17"}, "float17"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ConfigError, match=words):
            convert(tmp_path / "a", tmp_path / "b", **arguments)
    with pytest.raises(ConfigError, match="there is no source"):
        convert([], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_the_report(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b", to="huggingface")
    assert isinstance(done, Conversion)
    assert done.source == (str(tmp_path / "a"),) and done.target == str(tmp_path / "b")
