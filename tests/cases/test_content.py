"""What a checkpoint holds, byte by byte: U02, U03, U15, U16; and the config part of T82."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_pipeline.core.errors import ChecksumError, ConfigError, CorruptCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipeline import Pipeline
from tests.cases.jobs import pipeline_of
from tests.equal import assert_same

KINDS = ["torch_save", "safetensors"]


def model(value: float) -> dict[str, Any]:
    return {"a": torch.full((300, 7), value), "b": {"c": torch.full((11,), value), "n": value}}


def data_files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.distcp"), *path.glob("*.safetensors")])


def refused(path: Path, template: dict[str, Any] | None = None, **config: Any) -> str:
    """Load what has to be refused; the template stays as it was."""
    state = template or model(-1.0)
    before = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    with pipeline_of(config) as pipeline, pytest.raises(CorruptCheckpointError) as caught:
        pipeline.load(state, path)
    for key, value in before.items():
        assert_same(state[key], value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["distcp", "sums"])
@pytest.mark.parametrize("serialization", KINDS)
def test_u03_a_file_of_another_save_of_the_same_model(
    tmp_path: Path, serialization: str, kind: str
) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    with pipeline_of({"serialization": serialization}) as pipeline:
        pipeline.save(model(1.0), one)
        pipeline.save(model(2.0), other)
    extension = "sums" if kind == "sums" else data_files(one)[0].suffix[1:]
    (mine,), (theirs,) = one.glob(f"*.{extension}"), other.glob(f"*.{extension}")
    assert mine.name != theirs.name and mine.stat().st_size == theirs.stat().st_size
    shutil.copy(theirs, mine)
    assert mine.name in refused(one, serialization=serialization)


def test_u03_a_whole_set_of_data_and_sums_of_another_save(tmp_path: Path) -> None:
    one, other = tmp_path / "1", tmp_path / "2"
    with pipeline_of() as pipeline:
        pipeline.save(model(1.0), one)
        pipeline.save(model(2.0), other)
    for pattern in ("*.distcp", "*.sums"):
        (mine,), (theirs,) = one.glob(pattern), other.glob(pattern)
        shutil.copy(theirs, mine)
    assert ".sums" in refused(one)


@pytest.mark.parametrize("checksum", ["xxh3_64", "crc32", "sha256"])
@pytest.mark.parametrize("serialization", KINDS)
def test_u02_flips_spread_over_the_data_are_all_refused(
    tmp_path: Path, serialization: str, checksum: str
) -> None:
    config = {"serialization": serialization, "layout": {"checksum": checksum}}
    with pipeline_of(config) as pipeline:
        pipeline.save(model(1.0), tmp_path)
    (path,) = data_files(tmp_path)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        said = refused(tmp_path, **config)
        assert path.name in said and "rank 0" in said
    path.write_bytes(whole)
    with pipeline_of(config) as pipeline:
        pipeline.load(model(-1.0), tmp_path)


def test_u02_a_partial_read_verifies_what_it_reads(tmp_path: Path) -> None:
    state = {"a": torch.arange(1 << 16).float(), "b": torch.arange(1 << 16).float()}
    config = {"layout": {"block_bytes": "4KiB"}, "strict": False}
    with pipeline_of(config) as pipeline:
        pipeline.save(state, tmp_path)
        table = pipeline.save(state, tmp_path).manifest.table
    (path,) = data_files(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[int(table.offset[1] + table.payload[1]) + 100_000] ^= 16
    path.write_bytes(damaged)
    # What does not touch the damage loads, and what does is named.
    with pipeline_of(config) as pipeline:
        found = {"a": torch.zeros(1 << 16)}
        pipeline.load(found, tmp_path)
        assert_same(found["a"], state["a"])
    said = refused(tmp_path, {"b": torch.zeros(1 << 16)}, **config)
    assert "holds b" in said and path.name in said


@pytest.mark.parametrize("name", ["manifest.json", "*.sums"])
def test_any_byte_of_the_records_is_covered(tmp_path: Path, name: str) -> None:
    with pipeline_of() as pipeline:
        pipeline.save(model(1.0), tmp_path)
    (path,) = tmp_path.glob(name)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        refused(tmp_path)
    for cut in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:cut])
        refused(tmp_path)


@pytest.mark.parametrize("stager", ["inplace", "host"])
@pytest.mark.parametrize("serialization", KINDS)
def test_u15_only_the_bytes_of_a_view_are_staged_and_written(
    tmp_path: Path, stager: str, serialization: str
) -> None:
    storage = torch.zeros(1 << 22)
    views = {
        "row": storage[100:110],
        "strided": storage[::1000][:10],
        "transposed": storage[:12].reshape(3, 4).t(),
        "expanded": storage[:1].expand(10),
        "0-dim": storage[7],
        "column": storage.reshape(2048, 2048)[:10, 3],
    }
    storage[:] = torch.arange(1 << 22)
    expected = {key: view.clone() for key, view in views.items()}
    config = {"stager": stager, "serialization": serialization}
    with pipeline_of(config) as pipeline:
        pipeline.save({"only": views["row"]}, tmp_path / "one")
        staged = getattr(pipeline._parts.stager, "nbytes", 0)
        assert staged <= 64
        (file,) = data_files(tmp_path / "one")
        assert file.stat().st_size < 3000
        pipeline.save(views, tmp_path / "all")
        template = {key: torch.zeros_like(view) for key, view in expected.items()}
        pipeline.load(template, tmp_path / "all")
    assert_same(template, expected)


def test_u15_shared_memory_is_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(1 << 16).float()
    state = {"embedding": weight, "head": {"weight": weight}, "part": weight[:10]}
    with pipeline_of() as pipeline:
        manifest = pipeline.save(state, tmp_path).manifest
        template: dict[str, Any] = {"embedding": torch.zeros_like(weight)}
        template |= {"head": {"weight": torch.zeros_like(weight)}, "part": torch.zeros(10)}
        pipeline.load(template, tmp_path)
    assert_same(template, state)
    assert sum(entry.size for entry in manifest.files) < 1.1 * weight.nbytes
    assert [spec.alias for spec in manifest.table.keys].count(-1) == 2


@pytest.mark.parametrize(
    "leaf",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        torch.empty(2, device="meta"),
        object(),
        lambda: None,
        np.array(["text"]),
        np.array([object()]),
        np.array(["2020-01-01"], "datetime64[D]"),
        [torch.eye(2).to_sparse()],
        {("a", "tuple"): torch.ones(1)},
        {b"bytes": torch.ones(1)},
    ],
    ids=lambda leaf: type(leaf).__name__,
)
@pytest.mark.parametrize("serialization", KINDS)
def test_u16_what_cannot_be_stored_is_named_before_anything_is_written(
    tmp_path: Path, leaf: Any, serialization: str
) -> None:
    state = {"fine": torch.ones(2), "deep": {"bad": leaf, "worse": (leaf, torch.ones(1))}}
    with pipeline_of({"serialization": serialization}) as pipeline:
        with pytest.raises(TypeError) as caught:
            pipeline.save(state, tmp_path / "new")
    assert "deep.bad" in str(caught.value) and "deep.worse.0" in str(caught.value)
    assert "fine" not in str(caught.value)
    assert not os.path.exists(tmp_path / "new")


def test_u16_tensors_inside_tuples_load_in_place(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        one = torch.full((3,), value)
        return {"pair": (one, (one + 1, value)), "list": [(one + 2,), one + 3]}

    template = state(-9.0)
    tensors = [template["pair"][0], template["pair"][1][0], template["list"][0][0]]
    with pipeline_of() as pipeline:
        pipeline.save(state(1.0), tmp_path)
        pipeline.load(template, tmp_path)
    assert_same(template, state(1.0))
    assert template["pair"][0] is tensors[0] and template["pair"][1][0] is tensors[1]
    assert template["list"][0][0] is tensors[2]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"storage": {"kind": "memory", "thread_count": 4}}, "storage.thread_count"),
        ({"storage": {"kind": "filesystem", "bucket": "b"}}, "storage.bucket"),
        ({"stager": {"kind": "inplace", "pin": True}}, "stager.pin"),
        ({"serialization": {"kind": "safetensors", "trusted": True}}, "serialization.trusted"),
        ({"planner": {"dedup": "balanced", "seed": 1}}, "planner.seed"),
        ({"layout": {"metdata": False}}, "layout.metdata"),
        ({"coordination": {"kind": "single_process", "timeout_seconds": 5}},
         "coordination.timeout_seconds"),
        ({"casts": [{"keys": "*", "overflow": "error"}]}, "casts[0].overflow"),
        ({"transforms": [{"kind": "exclude", "keys": ["a"], "dtype": "int8"}]},
         "transforms[0].dtype"),
        ({"everything": True}, "everything"),
    ],
)  # fmt: skip
def test_t82_a_key_that_no_chosen_kind_uses(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_config(settings)
    assert path in str(caught.value) and caught.value.path == path


def test_the_config_is_recorded(tmp_path: Path) -> None:
    with pipeline_of({"layout": {"checksum": "sha256"}}) as pipeline:
        pipeline.save(model(1.0), tmp_path)
        manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
        assert manifest.config == pipeline.config.to_dict()
        assert manifest.checksum == "sha256" and manifest.versions["torch"] == torch.__version__
    assert issubclass(ChecksumError, CorruptCheckpointError)
