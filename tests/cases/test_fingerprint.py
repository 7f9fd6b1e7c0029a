"""One state, one fingerprint: on any number of ranks, in any layout, saved in any way."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_pipeline
from dcp_pipeline import Fingerprint, Manifest, Pipeline, RankLocal, fingerprint
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.dtypes import ITEM_SIZES
from tests.core.test_crc64 import by_the_book
from tests.distributed.pool import Pool
from tests.golden.values import value_of
from tests.marks import slow
from tests.properties.shards import Sharding, dtensor_of, part_of

SERIALIZATIONS = ["torch_save", "safetensors"]

TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "matrix": ("float32", (7, 5)),
    "large": ("bfloat16", (300, 130)),
    "one": ("int64", (1,)),
    "empty": ("float32", (0, 3)),
    "cube": ("complex64", (5, 4, 3)),
    "bytes": ("float8_e4m3fn", (6, 9)),
    "flags": ("bool", (4, 4)),
}
LAYOUTS = ("rows", "columns", "replicated", "strided", "two dimensions")


def placements_of(layout: str, shape: tuple[int, ...], size: int) -> Sharding:
    last = len(shape) - 1
    if layout == "two dimensions":
        return Sharding((size, 1), (Shard(0), Shard(last)))
    placement = {
        "rows": Shard(0),
        "columns": Shard(last),
        "replicated": Replicate(),
        "strided": _StridedShard(0, split_factor=2),
    }[layout]
    return Sharding((size,), (placement,))


def others() -> dict[str, Any]:
    """What every rank has whole."""
    tied = value_of("tied", (3, 4), "float32")
    return {
        "tied": {"first": tied, "second": tied},
        "scalar": torch.tensor(2.5),
        "transposed": value_of("t", (30, 4), "int16").t(),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float64(0.1),
        "stream": io.BytesIO(b"\x00stream"),
        "values": {"step": 3, "betas": (0.9, 0.999), "raw": b"\xff", "nested": [1, {"x": None}]},
        "nothing": {},
    }


def whole_tensors() -> dict[str, torch.Tensor]:
    return {name: value_of(name, shape, dtype) for name, (dtype, shape) in TENSORS.items()}


def whole_state() -> dict[str, Any]:
    return others() | {"sharded": whole_tensors()}


def sharded_tensors(layout: str) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    found = {}
    for name, (dtype, shape) in TENSORS.items():
        sharding = placements_of(layout, shape, size)
        # Torch cuts no float8 on the CPU.
        local = part_of(value_of(name, shape, dtype).view(torch.uint8), sharding, rank) if (
            dtype.startswith("float8")
        ) else part_of(value_of(name, shape, dtype), sharding, rank)  # fmt: skip
        found[name] = dtensor_of(local.view(getattr(torch, dtype)), shape, sharding, rank)
    return found


def sharded_state(layout: str) -> dict[str, Any]:
    return others() | {"sharded": sharded_tensors(layout)}


def save_and_compare(path: Path) -> Fingerprint:
    state = others() | {layout: sharded_tensors(layout) for layout in LAYOUTS}
    live = fingerprint(state)
    for serialization in SERIALIZATIONS:
        with Pipeline.from_recipe("tiny_decoder", [f"serialization={serialization}"]) as pipeline:
            assert pipeline.save(state, path / serialization).manifest.fingerprint == live
    return live


@pytest.fixture(scope="module")
def wanted() -> Fingerprint:
    return fingerprint(whole_state())


@pytest.mark.parametrize("size", [1, slow(2), 3, slow(4)])
def test_one_state_has_one_fingerprint_on_any_ranks(
    ranks: Pool, tmp_path: Path, wanted: Fingerprint, size: int
) -> None:
    on_one = fingerprint(others() | {layout: whole_tensors() for layout in LAYOUTS})
    assert ranks(size).run(save_and_compare, tmp_path) == [on_one] * size
    for layout in LAYOUTS:
        for name in TENSORS:
            assert on_one.tensors[f"{layout}.{name}"] == wanted.tensors[f"sharded.{name}"]
    for serialization in SERIALIZATIONS:
        assert read(tmp_path / serialization).fingerprint == on_one
        report = dcp_pipeline.verify(tmp_path / serialization)
        assert report.is_well and report.fingerprint == on_one.value


def read(path: Path) -> Manifest:
    return Manifest.decode((path / "manifest.json").read_bytes())


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_a_save_of_one_process_has_that_of_the_live_state(
    tmp_path: Path, wanted: Fingerprint, serialization: str
) -> None:
    config = {"serialization": serialization, "planner": {"split_bytes": 1}}
    saved = dcp_pipeline.save(whole_state(), checkpoint_id=tmp_path, config=config)
    assert saved.manifest.fingerprint == wanted == read(tmp_path).fingerprint
    report = dcp_pipeline.verify(tmp_path)
    assert report.is_well and report.fingerprint == wanted.value and not report.notes


def test_a_tensors_is_the_crc_of_its_bytes(wanted: Fingerprint) -> None:
    for name, (dtype, shape) in TENSORS.items():
        data = value_of(name, shape, dtype).reshape(-1).view(torch.uint8).numpy().tobytes()
        assert wanted.tensors[f"sharded.{name}"] == f"{by_the_book(data):016x}", name
    turned = value_of("t", (30, 4), "int16").numpy().T.tobytes()
    assert wanted.tensors["transposed"] == f"{by_the_book(turned):016x}"
    assert wanted.tensors["tied.first"] == wanted.tensors["tied.second"]
    assert wanted.tensors["number"] == f"{by_the_book(np.float64(0.1).tobytes()):016x}"
    assert set(wanted.values) == {
        "stream", "values.step", "values.betas", "values.raw", "values.nested.0",
        "values.nested.1.x",
    }  # fmt: skip
    assert None not in wanted.values.values()


@pytest.mark.parametrize("dtype", list(ITEM_SIZES))
def test_every_dtype(tmp_path: Path, dtype: str) -> None:
    tensor = value_of("x", (5, 3), dtype)
    crc = f"{by_the_book(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()):016x}"
    assert fingerprint({"x": tensor}).tensors == {"x": crc}
    saved = dcp_pipeline.save({"x": tensor}, checkpoint_id=tmp_path)
    assert saved.manifest.fingerprint.tensors == {"x": crc}


def test_views_are_hashed_as_they_are_stored(tmp_path: Path) -> None:
    base = torch.randn(8, 6, dtype=torch.complex64)
    views = {"conj": base.conj(), "neg": base.conj().imag, "rows": base[::2], "flat": base[0, 1]}
    copies = {name: view.resolve_conj().resolve_neg().clone() for name, view in views.items()}
    assert fingerprint(views) == fingerprint(copies)
    saved = dcp_pipeline.save(views, checkpoint_id=tmp_path)
    assert saved.manifest.fingerprint == fingerprint(copies)


def flipped(tensor: torch.Tensor, at: int, bit: int) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[at] ^= 1 << bit
    return copy


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4 * 35 - 1), st.integers(0, 7))
def test_any_bit_changes_it(at: int, bit: int) -> None:
    tensor = torch.arange(35.0).view(7, 5)
    one, other = fingerprint({"w": tensor}), fingerprint({"w": flipped(tensor, at, bit)})
    assert one != other and one.value != other.value and one.tensors["w"] != other.tensors["w"]


def test_what_changes_it_and_what_does_not() -> None:
    def state() -> dict[str, Any]:
        return {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0, 12).view(2, 3), "n": 1}

    one = state()
    swapped = state()
    swapped["a"][0, 0], swapped["a"][0, 1] = 1.0, 0.0
    crossed = {"a": one["b"], "b": one["a"], "n": 1}
    renamed = {"a": one["a"], "c": one["b"], "n": 1}
    reshaped = one | {"a": one["a"].view(3, 2)}
    same_bytes = one | {"a": one["a"].view(torch.int32)}
    nested = {"a": one["a"], "b": {"b": one["b"]}, "n": 1}
    values = [one | {"n": value} for value in (2, 1.0, True, None, "1", [1], (1,), np.int64(1))]
    different = [one, swapped, crossed, renamed, reshaped, same_bytes, nested, *values]
    assert len({fingerprint(each).value for each in different}) == len(different)
    assert fingerprint(dict(reversed(state().items()))) == fingerprint(one)
    tied = one | {"b": one["a"]}
    assert fingerprint(tied) == fingerprint(one | {"b": one["a"].clone()})
    assert fingerprint(one | {"e": {}}) == fingerprint(one)


class Counting:
    """Expanded as a save does it."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3, "w": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_stateful_objects_are_expanded() -> None:
    assert fingerprint({"x": Counting()}) == fingerprint({"x": {"count": 3, "w": torch.ones(2)}})


class OfTheUser:
    def __init__(self) -> None:
        self.x = 1


def test_a_value_without_typed_json_has_none(tmp_path: Path) -> None:
    found = fingerprint({"o": OfTheUser(), "w": torch.ones(2)})
    assert found.values == {"o": None} and found.tensors
    config = {"serialization": {"kind": "torch_save", "trusted": True}}
    saved = dcp_pipeline.save({"o": OfTheUser(), "w": torch.ones(2)}, checkpoint_id=tmp_path,
                              config=config)  # fmt: skip
    assert saved.manifest.fingerprint == found == read(tmp_path).fingerprint
    assert dcp_pipeline.verify(tmp_path).is_well


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_off_there_is_none(
    tmp_path: Path, serialization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["fingerprint=false", f"serialization={serialization}"]
    with Pipeline.from_recipe("tiny_decoder", overrides) as pipeline:
        assert pipeline.save(whole_state(), tmp_path).manifest.fingerprint is None
    report = dcp_pipeline.verify(tmp_path)
    assert report.is_well and report.fingerprint is None
    assert report.notes[0].startswith("no fingerprint of the values was recorded")
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["fingerprint"] is None
    assert {key["fingerprint"] for key in shown["keys"]} == {None}


def rank_local(path: Path) -> Fingerprint:
    rank = dist.get_rank()
    state = {"w": torch.ones(3), "own": RankLocal({"seed": rank, "t": torch.full((2,), rank)})}
    live = fingerprint(state)
    assert dcp_pipeline.save(state, checkpoint_id=path).manifest.fingerprint == live
    return live


def test_what_each_rank_has_of_its_own_counts_under_its_keys(ranks: Pool, tmp_path: Path) -> None:
    one, other = ranks(2).run(rank_local, tmp_path)
    assert one == other
    assert set(one.values) == {"own.rank-0-of-2.seed", "own.rank-1-of-2.seed"}
    assert one.tensors["own.rank-0-of-2.t"] != one.tensors["own.rank-1-of-2.t"]


def differing() -> None:
    fingerprint({"w": torch.full((3,), float(dist.get_rank()))})


def test_replicas_that_differ_are_named(ranks: Pool) -> None:
    for failure in ranks(2).fail(differing):
        assert "'w'" in str(failure) and "differ" in str(failure)


def failing_on_one() -> None:
    fingerprint({"w": torch.ones(3) if dist.get_rank() else torch.ones(3, device="meta")})


def test_a_failure_reaches_all_ranks(ranks: Pool) -> None:
    for failure in ranks(2).fail(failing_on_one):
        assert "meta device" in str(failure)


def save_in_background(path: Path, kind: str) -> Fingerprint | None:
    state = sharded_state("columns")
    with Pipeline.from_recipe("tiny_decoder", [f"background={kind}"]) as pipeline:
        return pipeline.async_save(state, path).result().manifest.fingerprint


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_saves_in_the_background(
    ranks: Pool, tmp_path: Path, wanted: Fingerprint, kind: str
) -> None:
    assert ranks(2).run(save_in_background, tmp_path, kind) == [wanted, wanted]
    assert read(tmp_path).fingerprint == wanted


def test_a_resume_is_proven(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, target = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    saved = dcp_pipeline.save({"m": model.state_dict(), "step": 4}, checkpoint_id=tmp_path)
    state = {"m": target.state_dict(), "step": 0}
    assert fingerprint(state) != saved.manifest.fingerprint
    dcp_pipeline.load(state, checkpoint_id=tmp_path)
    assert fingerprint(state) == read(tmp_path).fingerprint


def test_planners_of_dcp_record_none(tmp_path: Path) -> None:
    dcp_pipeline.save({"w": torch.ones(3)}, checkpoint_id=tmp_path,
                      planner=dcp_pipeline.DefaultSavePlanner(), no_dist=True)  # fmt: skip
    assert read(tmp_path).fingerprint is None


def test_small_blocks_and_many_files(tmp_path: Path) -> None:
    """Chunks go over the borders of buffers, steps and files."""
    state = {f"w{i}": torch.randn(1500, 1024) for i in range(5)} | {"big": torch.randn(2500, 1000)}
    config = {
        "layout": {"block_bytes": "4KiB"},
        "storage": {"kind": "filesystem", "buffer_bytes": "12KiB", "thread_count": 3},
    }
    saved = dcp_pipeline.save(state, checkpoint_id=tmp_path, config=config)
    assert saved.manifest.fingerprint == fingerprint(state)
    assert len(saved.manifest.files) == 3
    assert dcp_pipeline.verify(tmp_path, threads=2).is_well
