"""Exports as Hugging Face repositories, by one process and by ranks; read by safetensors itself."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_pipeline as dcp
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    RuleError,
    UnsupportedLeafError,
)
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.marks import mostly_slow, slow

INDEX = "model.safetensors.index.json"
COMPLEX_PAIRS = ("complex32", "complex128")
STORABLE = [name for name in DTYPES if name not in COMPLEX_PAIRS]


def config(**layout: Any) -> dict[str, Any]:
    return {"layout": {"kind": "huggingface", **layout}}


def random_of(dtype: str, *shape: int) -> torch.Tensor:
    """Any bits; of bool only those that are one."""
    torch.manual_seed(len(dtype) + sum(shape))
    width = DTYPES[dtype].itemsize
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, width), dtype=torch.uint8)
    return raw.view(DTYPES[dtype]).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def by_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, each from the file that the index names, and nothing else in any."""
    if (path / "model.safetensors").exists():
        assert not (path / INDEX).exists()
        return load_file(path / "model.safetensors")
    index = json.loads((path / INDEX).read_text())
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        held = load_file(path / name)
        assert all(index["weight_map"][key] == name for key in held)
        found |= held
        with safe_open(path / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
    assert found.keys() == index["weight_map"].keys()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    assert index["metadata"]["total_size"] == nbytes
    return found


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def every_dtype() -> dict[str, torch.Tensor]:
    state = {f"{name}.w": random_of(name, 6, 5) for name in STORABLE}
    scalars = {f"{name}.s": random_of(name) for name in STORABLE if "float4" not in name}
    return state | scalars | {"empty": torch.zeros(0, 3), "none": torch.zeros(3, 0)}


@pytest.mark.parametrize("max_shard_size", ["5GB", 300, 1])
def test_every_dtype(tmp_path: Path, max_shard_size: Any) -> None:
    """U04, on one rank."""
    state = every_dtype()
    dcp.save(state, checkpoint_id=tmp_path, config=config(max_shard_size=max_shard_size))
    known = {k: v for k, v in state.items() if "float4" not in k}
    found = by_safetensors(tmp_path)
    assert_same({name: found[name] for name in known}, known)
    back = {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype)
            if tensor.numel() and tensor.dim() else torch.empty_like(tensor)
            for name, tensor in state.items()}  # fmt: skip
    dcp.load(back, checkpoint_id=tmp_path, config=config())
    assert_same(back, state)


def shard(tensor: torch.Tensor, number: int) -> Any:
    size = torch.distributed.get_world_size()
    if size == 4 and number % 3 == 0 and tensor.dim() == 2:
        mesh = init_device_mesh("cpu", (2, 2))
        return distribute_tensor(tensor, mesh, [Shard(number % 2), Shard((number + 1) % 2)])
    mesh = init_device_mesh("cpu", (size,))
    if not tensor.dim() or number % 5 == 4:
        return distribute_tensor(tensor, mesh, [Replicate()])
    return distribute_tensor(tensor, mesh, [Shard(number % tensor.dim())])


def save_sharded(path: Path, max_shard_size: Any) -> Any:
    state = {name: tensor for name, tensor in every_dtype().items() if "float4" not in name}
    # Plain DTensors of odd dtypes have no collectives: they are replicated then.
    given = {}
    for number, (name, tensor) in enumerate(state.items()):
        is_usual = tensor.dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        given[name] = shard(tensor, number) if is_usual else tensor
    saved = dcp.save(given, checkpoint_id=path, config=config(max_shard_size=max_shard_size))
    return str(saved.manifest.fingerprint)


@pytest.mark.parametrize(
    ("size", "max_shard_size"),
    mostly_slow(product([1, 2, 4], ["5GB", 300]), [(2, "5GB"), (4, 300)]),
)
def test_on_ranks(ranks: Pool, tmp_path: Path, size: int, max_shard_size: Any) -> None:
    """U04 and T66: sharded, replicated and 0-dim tensors, each rank writing its part."""
    state = {name: tensor for name, tensor in every_dtype().items() if "float4" not in name}
    prints = ranks(size).run(save_sharded, tmp_path, max_shard_size)
    assert_same(by_safetensors(tmp_path), state)
    assert set(prints) == {str(dcp.fingerprint(state))}
    assert [name for name in names_in(tmp_path) if name.startswith(".")] == []


def save_disjoint(path: Path) -> None:
    rank = torch.distributed.get_rank()
    state = {f"layers.{rank}.w": torch.full((3, 2), float(rank)), "norm": torch.ones(4)}
    dcp.save(state, checkpoint_id=path, config=config())


def test_keys_of_single_ranks(ranks: Pool, tmp_path: Path) -> None:
    """T68: pipeline stages."""
    ranks(2).run(save_disjoint, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["layers.0.w", "layers.1.w", "norm"]
        assert torch.equal(file.get_tensor("layers.1.w"), torch.ones(3, 2))


def load_sharded(path: Path) -> list[bool]:
    wanted = state_of(1.0)
    given = {name: shard(torch.zeros_like(t), n) for n, (name, t) in enumerate(wanted.items())}
    dcp.load(given, checkpoint_id=path, config=config())
    return [
        torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, wanted[name])
        for name, tensor in given.items()
    ]


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": torch.arange(600.0).view(20, 30) + value + i for i in range(6)}


@pytest.mark.parametrize("size", [2, slow(4)])
def test_import_on_ranks(ranks: Pool, tmp_path: Path, size: int) -> None:
    dcp.save(state_of(1.0), checkpoint_id=tmp_path, config=config(max_shard_size=5000))
    assert all(all(row) for row in ranks(size).run(load_sharded, tmp_path))


SIZES = [10**9, 5000, 3000]


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_one_export_over_another(tmp_path: Path, before: int, after: int) -> None:
    """Whatever was there, what is left is the new one alone, under the usual names or its own."""
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "other.safetensors").write_bytes(b"mine")
    for size, value in [(before, 1.0), (after, 2.0), (after, 3.0)]:
        dcp.save(state_of(value), checkpoint_id=tmp_path, config=config(max_shard_size=size))
        assert_same(by_safetensors(tmp_path), state_of(value))
        count = {10**9: 1, 5000: 3, 3000: 6}[size]
        # What was there before stays, and nothing but one export is added.
        assert len(names_in(tmp_path)) == 2 + count + (count > 1)


def test_overwrite_can_be_refused(tmp_path: Path) -> None:
    dcp.save(state_of(1.0), checkpoint_id=tmp_path, config=config())
    with pytest.raises(CheckpointExistsError):
        dcp.save(state_of(2.0), checkpoint_id=tmp_path, config={**config(), "overwrite": "error"})
    assert_same(by_safetensors(tmp_path), state_of(1.0))


def test_given_files(tmp_path: Path) -> None:
    mapping = {f"layers.{i}.w": 1 + i % 2 for i in range(6)}
    dcp.save(state_of(1.0), checkpoint_id=tmp_path, config=config(fqn_to_index_mapping=mapping))
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert index == {key: f"model-0000{n}-of-00002.safetensors" for key, n in mapping.items()}
    wrong = {**{k: v for k, v in mapping.items() if k != "layers.0.w"}, "odd": 4}
    with pytest.raises(RuleError) as caught:
        dcp.save(state_of(1.0), checkpoint_id=tmp_path, config=config(fqn_to_index_mapping=wrong))
    for line in ("no file is given for 'layers.0.w'", "'odd', which the state lacks"):
        assert line in str(caught.value)
    assert_same(by_safetensors(tmp_path), state_of(1.0))


@pytest.mark.parametrize("tied", ["drop", "write"])
@pytest.mark.parametrize("max_shard_size", ["5GB", 40])
def test_tied_tensors(tmp_path: Path, tied: str, max_shard_size: Any) -> None:
    """T70: left out and tied again by our loads, or written twice."""
    weight = torch.arange(6.0)
    state = {"embed": weight, "norm": torch.ones(3), "head": weight}
    settings = config(tied=tied, max_shard_size=max_shard_size)
    saved = dcp.save(state, checkpoint_id=tmp_path, config=settings)
    wanted = {"embed", "norm"} | ({"head"} if tied == "write" else set())
    assert by_safetensors(tmp_path).keys() == wanted
    again = torch.zeros(6)
    back = {"embed": again, "norm": torch.zeros(3), "head": again}
    dcp.load(back, checkpoint_id=tmp_path, config=config())
    assert_same(back, state)
    assert str(saved.manifest.fingerprint) == str(dcp.fingerprint(state))


def test_assets(tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    kept = {"config.json": b"{}", "generation_config.json": b"{1}", "tokenizer.json": b"t",
            "tokenizer_config.json": b"c", "tokenizer.model": b"\0", "vocab.txt": b"v"}  # fmt: skip
    left = {"model.safetensors": b"w", "pytorch_model.bin": b"b", "notes.txt": b"n"}
    for name, data in (kept | left).items():
        (source / name).write_bytes(data)
    target = tmp_path / "to"
    for _ in range(2):
        dcp.save(state_of(1.0), checkpoint_id=target, config=config(assets=str(source)))
        assert names_in(target) == sorted([*kept, "model.safetensors"])
        assert {name: (target / name).read_bytes() for name in kept} == kept
    with pytest.raises(OSError, match=r"layout\.assets"):
        dcp.save(state_of(2.0), checkpoint_id=target, config=config(assets=str(tmp_path / "no")))
    (tmp_path / "void").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="a tokenizer lies"):
        dcp.save(state_of(2.0), checkpoint_id=target, config=config(assets=str(tmp_path / "void")))
    assert_same(by_safetensors(target), state_of(1.0))
    assert names_in(target) == sorted([*kept, "model.safetensors"])


def test_what_it_cannot_hold_is_named_before_anything_is_written(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "step": 3, "z": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(UnsupportedLeafError) as caught:
        dcp.save(state, checkpoint_id=tmp_path / "x", config=config())
    assert "'step' is no tensor" in str(caught.value)
    assert "'z' is of complex128" in str(caught.value)
    assert not (tmp_path / "x").exists() or names_in(tmp_path / "x") == []


def test_no_state_at_all(tmp_path: Path) -> None:
    dcp.save({}, checkpoint_id=tmp_path, config=config())
    assert by_safetensors(tmp_path) == {}


def test_serialization_follows_the_layout(tmp_path: Path) -> None:
    assert dcp.PipelineConfig(**config()).serialization.kind == "safetensors"
    with pytest.raises(ConfigError, match=r"works with: safetensors"):
        dcp.Pipeline.from_config({**config(), "serialization": "torch_save"})
