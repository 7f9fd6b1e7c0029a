"""Two checkpoints are alike, or it is said where they are not."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import dcp_pipeline
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import CheckpointNotFoundError, ChecksumError, ConfigError
from dcp_pipeline.tools.convert import convert
from dcp_pipeline.tools.diff import Difference, DiffReport, diff
from dcp_pipeline.tools.diff_values import Tally
from dcp_pipeline.types.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NO_FINGERPRINT = {"fingerprint": False}


def state() -> dict[str, Any]:
    tied = torch.arange(24.0).view(4, 6)
    return {
        "model": {"w": tied, "tied": tied, "half": torch.arange(5, dtype=torch.bfloat16)},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "step": 3,
        "lr": [0.1, math.nan],
    }


def saved(path: Path, value: dict[str, Any], **config: Any) -> Path:
    dcp_pipeline.save(value, checkpoint_id=path, config=config)
    return path


def only(report: DiffReport) -> Difference:
    (found,) = report.differences
    return found


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["diff", *arguments])
    return int(stopped.value.code or 0)


def test_equal_states_are_told_by_their_fingerprints(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", state())
    b = saved(tmp_path / "b", state(), serialization="safetensors")
    found = diff(a, b)
    assert found.is_alike and found.keys == found.by_fingerprint == 7 and found.nbytes == 0


def test_equal_states_without_fingerprints_are_read(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", state())
    b = saved(tmp_path / "b", state(), serialization="safetensors", **NO_FINGERPRINT)
    found = diff(a, b)
    assert found.is_alike and found.by_fingerprint == 0
    assert found.nbytes == 2 * 24 * 4 + 5 * 2 + 8  # both names of what is tied


def test_formats_of_others_are_compared_with_ours(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(30, 7), "b": torch.arange(9, dtype=torch.int16)}
    ours = saved(tmp_path / "ours", tensors)
    dcp.save(tensors, checkpoint_id=tmp_path / "plain")
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    convert(ours, tmp_path / "mega", to="mega")
    for other in ("plain", "hf", "mega"):
        assert diff(ours, tmp_path / other).is_alike, other
        assert diff(tmp_path / other, ours).is_alike, other
    changed = dict(tensors, b=tensors["b"] + 1)
    save_file(changed, tmp_path / "hf" / "model.safetensors")
    assert only(diff(ours, tmp_path / "hf")).name == "b"


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_one_bit_of_any_dtype_is_found(tmp_path: Path, dtype: str) -> None:
    size = ITEM_SIZES[dtype]
    bits = torch.zeros(6 * size, dtype=torch.uint8)
    a = saved(tmp_path / "a", {"t": bits.view(DTYPES[dtype]).view(2, 3)})
    changed = bits.clone()
    changed[4 * size] = 1
    b = saved(tmp_path / "b", {"t": changed.view(DTYPES[dtype]).view(2, 3)})
    found = only(diff(a, b))
    assert (found.what, found.elements, found.different, found.first) == ("values", 6, 1, (1, 1))
    assert found.a != found.b


def test_how_far_values_are_apart(tmp_path: Path) -> None:
    one = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, -1.0]])
    other = torch.tensor([[1.0, 2.5, 4.0], [7.0, 0.0, -1.0]])
    a, b = saved(tmp_path / "a", {"t": one}), saved(tmp_path / "b", {"t": other})
    found = only(diff(a, b))
    assert (found.different, found.first, found.max_abs) == (2, (0, 1), 1.0)
    assert found.max_rel == pytest.approx(0.2)  # 0.5 / 2.5, more than 1 / 7
    assert (found.a, found.b) == ("2.0", "2.5")
    near = only(diff(a, b, rtol=0.15))
    assert (near.different, near.first, near.max_abs) == (1, (0, 1), 0.5)
    assert diff(a, b, atol=1.0).is_alike and diff(a, b, rtol=0.2).is_alike
    assert only(diff(a, b, atol=0.99)).first == (1, 0)


@pytest.mark.parametrize(
    ("a", "b", "different"),
    [
        ([math.nan], [math.nan], 0),
        ([math.nan], [1.0], 1),
        ([math.inf, -math.inf], [math.inf, -math.inf], 0),
        ([math.inf], [-math.inf], 1),
        ([math.inf], [1e30], 1),
        ([0.0], [-0.0], 0),
        ([1.0], [1.5], 1),
    ],
)
def test_what_is_near_to_what(a: list[float], b: list[float], different: int) -> None:
    tally = Tally(rtol=1e-3, atol=1e-3)
    tally.add((0,), torch.tensor(a), torch.tensor(b))
    assert tally.different == different
    if different and not math.isfinite(a[0] - b[0]):
        assert tally.max_abs == math.inf


def test_bits_count_without_a_tolerance() -> None:
    tally = Tally()
    tally.add((3,), torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))
    assert (tally.different, tally.max_abs, tally.first) == (1, 0.0, (4,))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        ("int64", 2**62 + 1, 2**62, 1),
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("uint64", 2**64 - 1, 0, 2**64 - 1),
        ("uint64", 3, 5, 2),
        ("bool", 1, 0, 1),
        ("uint8", 0, 255, 255),
        ("int8", -128, 127, 255),
        ("complex64", 3 + 4j, 0, 5),
        ("complex32", 3 + 4j, 0, 5),
    ],
)
def test_distances_are_exact(dtype: str, a: Any, b: Any, distance: float) -> None:
    tally = Tally()
    one, other = (
        torch.tensor([number], dtype=torch.uint64)
        if dtype == "uint64"
        else torch.tensor([number]).to(DTYPES[dtype])
        for number in (a, b)
    )
    tally.add((0,), one, other)
    assert (tally.different, tally.max_abs) == (1, float(distance))


def test_large_tensors_go_slab_by_slab(tmp_path: Path) -> None:
    one = torch.zeros(3, 1_500_000)
    other = one.clone()
    other[1, 1_400_000] = 2.0
    other[2, 7] = 3.0
    a, b = saved(tmp_path / "a", {"t": one}), saved(tmp_path / "b", {"t": other})
    found = only(diff(a, b, threads=1, memory="128MiB"))
    assert (found.different, found.first, found.max_abs) == (2, (1, 1_400_000), 3.0)
    assert found.max_rel == 1.0


def test_keys_shapes_dtypes_and_kinds(tmp_path: Path) -> None:
    a = saved(
        tmp_path / "a",
        {"gone": 1, "shape": torch.zeros(2, 3), "dtype": torch.ones(4), "kind": 5, "same": 1},
    )
    b = saved(
        tmp_path / "b",
        {
            "shape": torch.zeros(3, 2),
            "dtype": torch.ones(4, dtype=torch.bfloat16),
            "kind": torch.tensor(5),
            "same": 1,
            "new": torch.zeros(2),
        },
    )
    found = {one.name: one for one in diff(a, b).differences}
    assert {name: one.what for name, one in found.items()} == {
        "gone": "only in a",
        "shape": "shape",
        "dtype": "dtype",
        "kind": "kind",
        "new": "only in b",
    }
    assert (found["shape"].a, found["shape"].b) == ("float32 [2, 3]", "float32 [3, 2]")
    assert (found["dtype"].a, found["dtype"].different) == ("float32 [4]", 0)
    assert found["new"].b == "float32 [2]" and found["gone"].a == "value"


def test_values_are_compared_across_dtypes(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"t": torch.tensor([1.0, 1.001])})
    b = saved(tmp_path / "b", {"t": torch.tensor([1.0, 1.001]).bfloat16()})
    found = only(diff(a, b))
    assert (found.what, found.different, found.first) == ("dtype and values", 1, (1,))
    near = only(diff(a, b, rtol=0.01))
    assert (near.what, near.different) == ("dtype", 0)


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    one = {"lr": [0.1, math.nan], "flag": True, "opt": {"betas": (0.9, 0.99)}}
    a = saved(tmp_path / "a", one, **NO_FINGERPRINT)
    b = saved(tmp_path / "b", one, serialization="safetensors")
    assert diff(a, b).is_alike
    c = saved(tmp_path / "c", dict(one, flag=1))
    found = only(diff(a, c))
    assert (found.name, found.what, found.a, found.b) == ("flag", "value", "True", "1")


def test_empty_containers_count_where_both_have_them(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"x": 1, "e": {"inner": {}}})
    b = saved(tmp_path / "b", {"x": 1, "e": {"inner": []}})
    c = saved(tmp_path / "c", {"x": 1})
    assert only(diff(a, b)).name == "e.inner"
    found = only(diff(a, c))
    assert (found.name, found.what, found.a, found.b) == ("e.inner", "only in a", "empty dict", "")
    assert only(diff(c, a)).what == "only in b"
    assert diff(a, b, drop=["e"]).is_alike


def test_globs_choose(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"m": {"x": 1, "y": 2}, "o": {"x": 1}})
    b = saved(tmp_path / "b", {"m": {"x": 1, "y": 3}, "o": {"x": 4}})
    assert [one.name for one in diff(a, b).differences] == ["m.y", "o.x"]
    assert [one.name for one in diff(a, b, only=["m"]).differences] == ["m.y"]
    assert diff(a, b, only=["m"], drop=["*.y"]).is_alike
    with pytest.raises(ConfigError, match=r"'n\.\*'"):
        diff(a, b, only=["n.*"])


@pytest.mark.parametrize(
    "wrong",
    [{"rtol": -1.0}, {"atol": math.nan}, {"threads": 0}, {"memory": "1MiB"}, {"memory": "much"}],
)
def test_wrong_arguments(tmp_path: Path, wrong: dict[str, Any]) -> None:
    a = saved(tmp_path / "a", {"x": 1})
    with pytest.raises(ConfigError):
        diff(a, a, **wrong)


def test_damage_is_an_error_and_no_difference(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"t": torch.arange(9000.0)}, **NO_FINGERPRINT)
    b = saved(tmp_path / "b", {"t": torch.arange(9000.0)}, **NO_FINGERPRINT)
    (file,) = b.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError, match=file.name):
        diff(a, b)
    with pytest.raises(CheckpointNotFoundError):
        diff(a, tmp_path / "nothing")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = saved(tmp_path / "a", {"t": torch.tensor([1.0, 2.0]), "n": torch.tensor([0.0])})
    b = saved(tmp_path / "b", {"t": torch.tensor([1.0, 2.5]), "n": torch.tensor([math.nan])})
    assert run(str(a), str(a)) == 0
    assert "2 are alike by the fingerprints" in capsys.readouterr().out
    assert run(str(a), str(b)) == 1
    out = capsys.readouterr().out
    assert "2 keys differ" in out and "1 of 2" in out
    assert run(str(a), str(b), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    by_name = {one["name"]: one for one in report["differences"]}
    assert report["is_alike"] is False and report["keys"] == 2
    assert by_name["t"]["max_abs"] == 0.5 and by_name["t"]["first"] == [1]
    assert by_name["n"]["max_abs"] == "inf"
    assert run(str(a), str(b), "--only", "t", "--atol", "0.5") == 0
    assert run(str(a), str(b), "--only", "z") == 2
    assert run(str(a), str(b), "--rtol", "-1") == 2
    assert run(str(a)) == 2


def test_long_lists_are_cut_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = saved(tmp_path / "a", {f"k{n}": n for n in range(60)})
    b = saved(tmp_path / "b", {f"k{n}": n + 1 for n in range(60)})
    assert run(str(a), str(b)) == 1
    out = capsys.readouterr().out
    assert "and 10 more" in out and "60 keys differ" in out
    assert run(str(a), str(b), "--json") == 1
    assert len(json.loads(capsys.readouterr().out)["differences"]) == 60
