"""Checkpoints of every released format load, with the values that were saved then."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_pipeline.api import load, load_keys
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipelines.fingerprinting import fingerprint
from dcp_pipeline.tools.verify import verify
from tests.distributed.pool import Pool
from tests.equal import assert_same, bits
from tests.golden.make_golden import sharded_of, training_of
from tests.golden.values import SHARDED, of_ours, of_ranks, of_training
from tests.marks import slow

HERE = Path(__file__).parent
OURS = sorted(path.name for path in HERE.glob("ours-*"))
PLAIN = sorted(path.name for path in HERE.glob("dcp-*"))
FINGERPRINT = "f3f88a4d4ab92e9850abd5a163b853f7f44d4583b8b9e31ce7e2bedc4d4b385b"


def test_all_of_them_are_there() -> None:
    kinds = ("safetensors", "torch_save")
    assert [f"ours-{version}-{kind}" for version in ("1.0", "1.1") for kind in kinds] == OURS
    assert PLAIN == ["dcp-2.11", "dcp-2.13", "dcp-2.14"]


def emptied(state: Any) -> Any:
    """The same state with nothing of its values left."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, torch.Tensor) for value in state):
        return [emptied(value) for value in state]
    if isinstance(state, torch.Tensor):
        empty = state.clone()
        bits(empty).zero_() if empty.is_contiguous() else empty.zero_()
        return empty
    return io.BytesIO() if isinstance(state, io.BytesIO) else None


def with_bytes(state: Any) -> Any:
    """Streams as their bytes, so that they can be compared; mappings in one order."""
    if isinstance(state, dict):
        return {key: with_bytes(state[key]) for key in sorted(state, key=repr)}
    return state.getvalue() if isinstance(state, io.BytesIO) else state


def assert_all(found: Any, wanted: Any) -> None:
    assert_same(with_bytes(found), with_bytes(wanted))


@pytest.mark.parametrize("name", OURS)
def test_ours_loads_without_a_template(name: str) -> None:
    assert_all(load_keys(HERE / name), of_ours() | of_ranks())


@pytest.mark.parametrize("name", OURS)
def test_ours_loads_into_a_template(name: str) -> None:
    wanted = of_ours() | of_ranks()
    state = emptied(wanted)
    # Containers and values that the checkpoint fills itself.
    state["none"] |= {"dict": {}, "list": [], "tuple": ()}
    state["values"] = {}
    report = load(state, checkpoint_id=HERE / name)
    assert report.is_verified and report.save_id
    assert_all(state, wanted)


@pytest.mark.parametrize("name", OURS)
def test_ours_is_what_it_was_made_to_be(name: str) -> None:
    manifest = Manifest.decode((HERE / name / "manifest.json").read_bytes())
    assert manifest.world_size == 2 and manifest.serialization == name.split("-")[-1]
    keys = dict(zip(manifest.names, manifest.table.keys, strict=True))
    chunks = {n: int((manifest.table.key == i).sum()) for i, n in enumerate(manifest.names)}
    assert keys["tied.second"].alias >= 0 and chunks["tied.second"] == 0
    assert chunks["sharded.rows"] == chunks["sharded.columns"] == 2
    assert chunks["sharded.strided"] > 2
    assert chunks["sharded.single"] == 1 and chunks["sharded.empty"] == 0


@pytest.mark.parametrize("name", OURS)
def test_ours_has_the_fingerprint_of_its_values(name: str) -> None:
    report = verify(HERE / name)
    assert report.is_well and not report.not_verified
    if "1.0" in name:
        assert report.fingerprint is None
        return
    manifest = Manifest.decode((HERE / name / "manifest.json").read_bytes())
    assert fingerprint(of_ours() | of_ranks()) == manifest.fingerprint
    assert report.fingerprint == FINGERPRINT


def read_ours(name: str) -> None:
    state = {"sharded": sharded_of(is_empty=True), "dtypes": emptied(of_ours()["dtypes"])}
    load(state, checkpoint_id=HERE / name, config={"strict": False})
    for key, value in sharded_of(is_empty=False).items():
        assert_same(state["sharded"][key].to_local(), value.to_local(), key)
    assert_same(state["dtypes"], of_ours()["dtypes"])


@pytest.mark.parametrize("name", [*map(slow, OURS[:-1]), OURS[-1]])
def test_ours_loads_on_other_numbers_of_ranks(ranks: Pool, name: str) -> None:
    for size in (2, 4):
        ranks(size).run(read_ours, name)


def test_plain_dcp_loads_ours() -> None:
    wanted = {key: of_ours()["sharded"][key] for key in SHARDED}
    state = {"sharded": emptied(wanted), "split": torch.zeros(1100, dtype=torch.int32)}
    dcp.load(state, checkpoint_id=HERE / "ours-1.0-torch_save", no_dist=True)
    assert_same(state["sharded"], wanted)
    assert_same(state["split"], of_ours()["split"])


def read_plain(name: str) -> dict[str, Any]:
    state = training_of(is_empty=True)
    report = load(state, checkpoint_id=HERE / name)
    assert not report.missing and not report.unexpected and not report.save_id
    wanted = training_of(is_empty=False)
    for found, value in (
        (state["model"], wanted["model"]),
        *((state["optimizer"]["state"][k], v) for k, v in wanted["optimizer"]["state"].items()),
    ):
        for key in value:
            assert torch.equal(bits(_local(found[key])), bits(_local(value[key]))), key
    return {"param_groups": state["optimizer"]["param_groups"]}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("name", [PLAIN[0], *map(slow, PLAIN[1:])])
def test_plain_dcps_load_on_1_2_and_4_ranks(ranks: Pool, name: str) -> None:
    for size in (1, 2, 4):
        (group,) = ranks(size).run(read_plain, name)[0]["param_groups"]
        assert group["lr"] == 0.001 and group["betas"] == (0.9, 0.999)
        assert group["params"] == ["weight"]


@pytest.mark.parametrize("name", PLAIN)
def test_plain_dcps_load_without_a_template(name: str) -> None:
    found = load_keys(HERE / name)
    state = found["optimizer"]["state"]["weight"]
    flat = {f"optimizer.state.weight.{key}": value for key, value in state.items()}
    assert_all(flat | {"model.weight": found["model"]["weight"]}, of_training())
