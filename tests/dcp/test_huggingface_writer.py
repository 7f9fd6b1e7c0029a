"""HuggingFaceStorageWriter under DCP's save and ours, by one process and by ranks."""

import dataclasses
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader as TorchReader,
    HuggingFaceStorageWriter as TorchWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_pipeline
from dcp_pipeline import HuggingFaceStorageReader, HuggingFaceStorageWriter
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    RuleError,
    ShapeConflictError,
    TilingError,
    UnsupportedLeafError,
)
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.equal import assert_same, bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

INDEX = "model.safetensors.index.json"
SAVES: dict[str, Callable[..., Any]] = {"dcp": dcp.save, "ours": dcp_pipeline.save}
STORABLE = [name for name in DTYPES if name not in ("complex32", "complex128")]
DISTRIBUTED = {"save_distributed": True, "enable_consolidation": True}


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, and T66's scalar and integer buffer."""
    torch.manual_seed(7)
    found = {}
    for name in STORABLE:
        width = DTYPES[name].itemsize
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 3, width), dtype=torch.uint8)
        found[name] = raw.view(DTYPES[name]).reshape(6, 3)
    found["zero-dim"] = torch.tensor(3.0)
    found["buffer"] = torch.arange(5)
    found["empty"] = torch.zeros(0, 4)
    return found


def read(path: Path) -> dict[str, torch.Tensor]:
    """Everything, each key from the file that the index names, and nothing else in any."""
    assert not [name for name in os.listdir(path) if name.startswith(".")]
    if (path / "model.safetensors").exists():
        assert os.listdir(path) == ["model.safetensors"]
        with safe_open(path / "model.safetensors", "pt") as file:
            assert file.metadata()["format"] == "pt"
        return load_file(path / "model.safetensors")
    index = json.loads((path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(os.listdir(path)) == [*files, INDEX]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        held = load_file(path / name)
        assert all(index["weight_map"][key] == name for key in held)
        found |= held
    assert found.keys() == index["weight_map"].keys()
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    assert index["metadata"]["total_size"] == nbytes
    return found


def why(save: Callable[..., Any], *arguments: Any, **named: Any) -> BaseException:
    """The error that a save raises; plain DCP wraps it."""
    with pytest.raises(BaseException) as caught:
        save(*arguments, **named)
    error = caught.value
    return error.failures[0][0] if type(error) is CheckpointException else error


def in_two_files() -> dict[str, int]:
    return {name: 1 + (number % 3 == 0) for number, name in enumerate(tensors())}


def test_the_arguments_are_torchs() -> None:
    theirs = inspect.signature(TorchWriter).parameters
    ours = inspect.signature(HuggingFaceStorageWriter).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [one.default for one in theirs.values()]
    more = list(ours.values())[len(theirs) :]
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in more)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("given", [{}, DISTRIBUTED], ids=["whole", "distributed"])
def test_one_process(tmp_path: Path, save: str, given: dict[str, Any]) -> None:
    SAVES[save](tensors(), storage_writer=HuggingFaceStorageWriter(tmp_path / "one", **given))
    assert os.listdir(tmp_path / "one") == ["model.safetensors"]
    assert_same_in(read(tmp_path / "one"), tensors())
    writer = HuggingFaceStorageWriter(str(tmp_path / "two"), in_two_files(), **given)
    SAVES[save](tensors(), storage_writer=writer)
    assert len(os.listdir(tmp_path / "two")) == 3
    assert_same_in(read(tmp_path / "two"), tensors())
    more = HuggingFaceStorageWriter(tmp_path / "cut", layout={"max_shard_size": 200}, **given)
    SAVES[save](tensors(), storage_writer=more)
    assert len(os.listdir(tmp_path / "cut")) > 3
    assert_same_in(read(tmp_path / "cut"), tensors())


def assert_same_in(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))


def on_mesh() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        placement = [Shard(0), Shard(1), Replicate()][number % 3]
        if tensor.dim() < 2 or not tensor.numel() or not isinstance(placement, Shard):
            state[name] = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
            continue
        raw = tensor.view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)
        local = raw.tensor_split(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
        state[name] = DTensor.from_local(
            local.view(tensor.dtype).reshape(local.shape[:-1]),
            mesh,
            [placement],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    state["buffer"] = tensors()["buffer"]
    return state


def save_on_ranks(path: Path, save: str) -> list[int]:
    rank = dist.get_rank()
    for folder, mapping in (("one", None), ("two", in_two_files())):
        writer = HuggingFaceStorageWriter(path / folder, mapping, 2, **DISTRIBUTED)
        SAVES[save](on_mesh(), storage_writer=writer)
    # T68: stages of a pipeline, each with keys of its own.
    names = list(tensors())
    mine = {name: tensors()[name] for name in names[rank :: dist.get_world_size()]}
    SAVES[save](mine, storage_writer=HuggingFaceStorageWriter(path / "stages", **DISTRIBUTED))
    shards = HuggingFaceStorageWriter(path / "shards", save_distributed=True)
    SAVES[save](on_mesh(), storage_writer=shards)
    both = HuggingFaceStorageWriter(path / "both", in_two_files(), save_distributed=True)
    SAVES[save](on_mesh(), storage_writer=both)
    few = readable(on_mesh())
    for folder, given in (("few", DISTRIBUTED), ("few-shards", {"save_distributed": True})):
        SAVES[save](few, storage_writer=HuggingFaceStorageWriter(path / folder, **given))
    ours = [HuggingFaceStorageReader(path / f) for f in ("one", "two", "stages", "shards", "both")]
    both = [one(str(path / f)) for one in (TorchReader, HuggingFaceStorageReader)
            for f in ("few", "few-shards")]  # fmt: skip
    found = []
    for reader in (*ours, *both):
        state = {name: torch.zeros_like(tensor) for name, tensor in few.items()}
        dcp.load(state, storage_reader=reader)
        found.append(sum(same(state[name], one) for name, one in few.items()))
    return found


def readable(state: dict[str, Any]) -> dict[str, Any]:
    """What torch's own reader knows; it gives up where one dtype of a file is unknown to it."""
    return {name: state[name] for name in ("float32", "bfloat16", "int64", "zero-dim", "buffer")}


def same(found: Any, wanted: Any) -> bool:
    local = [one.to_local() if isinstance(one, DTensor) else one for one in (found, wanted)]
    return torch.equal(bits(local[0]), bits(local[1]))


@pytest.mark.parametrize("save", SAVES)
def test_ranks(ranks: Pool, tmp_path: Path, save: str) -> None:
    found = ranks(2).run(save_on_ranks, tmp_path, save)
    assert found == [[5] * 9] * 2
    for folder in ("one", "two", "stages"):
        assert_same_in(read(tmp_path / folder), tensors())
    names = [f"shard-{rank:05}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    assert sorted(os.listdir(tmp_path / "shards")) == names
    with safe_open(tmp_path / "shards" / names[1], "pt") as file:
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        assert places["int64"]["saved_offsets"] in ([3, 0], [0, 2], [0, 0])
        assert file.metadata()["DCP_VERSION"] == "1.0"
    names = [f"shard-{r:05}-model-{n:05}-of-00002.safetensors" for r in (1, 2) for n in (1, 2)]
    assert sorted(os.listdir(tmp_path / "both")) == names
    loaded = dcp_pipeline.load_keys(tmp_path / "shards", config={"layout": "huggingface"})
    assert_same_in(loaded, tensors())


@pytest.mark.parametrize("save", SAVES)
def test_shards_of_one_process(tmp_path: Path, save: str) -> None:
    writer = HuggingFaceStorageWriter(tmp_path, save_distributed=True)
    SAVES[save](tensors(), storage_writer=writer)
    (name,) = os.listdir(tmp_path)
    assert name == "shard-00001-model-00001-of-00001.safetensors"
    assert_same_in(load_file(tmp_path / name), tensors())
    again = HuggingFaceStorageWriter(tmp_path, save_distributed=True)
    error = why(SAVES[save], tensors(), storage_writer=again)
    assert isinstance(error, CheckpointExistsError) and f"{name}, which every" in str(error)
    assert os.listdir(tmp_path) == [name]


def test_it_replaces_as_one_step_and_can_be_told_not_to(tmp_path: Path) -> None:
    dcp.save(tensors(), storage_writer=HuggingFaceStorageWriter(tmp_path, in_two_files()))
    refusing = HuggingFaceStorageWriter(tmp_path, overwrite=False)
    error = why(dcp.save, tensors(), storage_writer=refusing)
    assert isinstance(error, CheckpointExistsError)
    assert_same_in(read(tmp_path), tensors())
    changed = {"w": torch.ones(3)}
    meta = dcp.save(changed, storage_writer=HuggingFaceStorageWriter(tmp_path))
    assert_same_in(read(tmp_path), changed)
    (place,) = meta.storage_data.values()
    assert place.relative_path == "model.safetensors" and place.length == 12


@pytest.mark.parametrize("given", [{}, {"save_distributed": True}], ids=["final", "sharded"])
def test_what_it_cannot_hold_is_named_and_nothing_is_left(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    state = {"w": torch.ones(2), "step": 3, "c": torch.ones(2, dtype=torch.complex128)}
    for save in SAVES.values():
        error = why(save, state, storage_writer=HuggingFaceStorageWriter(tmp_path / "x", **given))
        assert isinstance(error, UnsupportedLeafError)
        assert "2 keys" in str(error) and "'step' is no tensor" in str(error)
        lacking = HuggingFaceStorageWriter(tmp_path / "x", {"w": 1}, **given)
        error = why(save, {"w": torch.ones(2), "v": torch.ones(2)}, storage_writer=lacking)
        assert isinstance(error, RuleError) and "no file is given for 'v'" in str(error)
        assert not (tmp_path / "x").exists() or not os.listdir(tmp_path / "x")


class Growing(dcp.DefaultSavePlanner):
    """Hands over what it has not planned."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object.double() if write_item.index.fqn == "w" else object


class Forgetful(dcp.DefaultSavePlanner):
    """Plans only a part of a tensor."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        items = []
        for item in plans[0].items:
            chunk = dataclasses.replace(item.tensor_data.chunk, sizes=torch.Size([1, 2]))
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, tensor_data=data))
        return [dataclasses.replace(plans[0], items=items)], metadata


@pytest.mark.parametrize("given", [{}, {"save_distributed": True}], ids=["final", "sharded"])
def test_planners_that_do_something_else(tmp_path: Path, given: dict[str, Any]) -> None:
    state = {"w": torch.ones(2, 2)}
    for save in SAVES.values():
        writer = HuggingFaceStorageWriter(tmp_path, **given)
        error = why(save, state, storage_writer=writer, planner=Growing())
        assert isinstance(error, ShapeConflictError)
        assert "'w' was planned as float32 [2, 2], and is float64 [2, 2]" in str(error)
        error = why(save, state, storage_writer=writer, planner=Forgetful())
        assert isinstance(error, TilingError) and "w" in str(error)
        assert not os.listdir(tmp_path)
