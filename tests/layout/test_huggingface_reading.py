"""Repositories are read as the official library reads them; what contradicts itself is refused."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as plain_save

import dcp_pipeline
from dcp_pipeline.core.errors import (
    CorruptCheckpointError,
    FormatError,
    ShapeMismatchError,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.huggingface import HuggingFaceLayout
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.equal import assert_same
from tests.huggingface_files import every_dtype, index_of, save_shards

CONFIG = {"layout": "huggingface", "serialization": "safetensors"}
INDEX = "model.safetensors.index.json"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def opened(path: Path) -> Manifest:
    directory = FileSystemStorage().open(str(path), follow_links=True)
    return HuggingFaceLayout().open(directory)


def names_in(path: Path) -> list[str]:
    return [entry.name for entry in opened(path).files]


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A template without any of the values."""
    return {
        name: torch.zeros(one.numel() * one.element_size(), dtype=torch.uint8)
        .view(one.dtype)
        .view(one.shape)
        for name, one in state.items()
    }


@pytest.mark.parametrize("count", [1, 3])
def test_u04_every_dtype_arrives_bit_equal(tmp_path: Path, count: int) -> None:
    state = every_dtype()
    if count == 1:
        save_file(state, tmp_path / "model.safetensors")
    else:
        save_shards(tmp_path, state, count)
    read = dcp_pipeline.load_keys(tmp_path, config=CONFIG)
    assert_same(dict(sorted(read.items())), dict(sorted(state.items())))
    template = zeros(state)
    report = dcp_pipeline.load(template, checkpoint_id=tmp_path, config=CONFIG)
    assert_same(template, state)
    assert not report.is_verified and report.loaded == sorted(state, key=report.loaded.index)


def test_keys_are_flat_and_found_by_name_in_a_nested_state(tmp_path: Path) -> None:
    save_file({"a.0.w": torch.ones(2), "a.1.w": torch.zeros(2)}, tmp_path / "model.safetensors")
    manifest = opened(tmp_path)
    assert [spec.path for spec in manifest.table.keys] == [(name,) for name in manifest.names]
    assert manifest.is_foreign and manifest.layout == "huggingface"
    nested = {"a": [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]}
    dcp_pipeline.load(nested, checkpoint_id=tmp_path, config=CONFIG)
    assert_same(nested, {"a": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}]})
    only = dcp_pipeline.load_keys(tmp_path, ["a.1.*"], config=CONFIG)
    assert_same(only, {"a.1.w": torch.zeros(2)})


def test_what_does_not_fit_is_one_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(3)}
    with pytest.raises(ShapeMismatchError, match=r"shape of w: .*2.*3"):
        dcp_pipeline.load(state, checkpoint_id=tmp_path, config=CONFIG)
    assert_same(state, {"w": torch.zeros(3)})


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["model.safetensors", "consolidated.safetensors", "pytorch_model.bin"], 0),
        (["adapter_model.safetensors", "pytorch_model.bin"], 0),
        (["consolidated.safetensors"], 0),
        (["a.safetensors", "b.safetensors"], slice(0, 2)),
        (["pytorch_model.bin", "training_args.bin"], 0),
        (["adapter_model.bin"], 0),
    ],
)
def test_which_files_make_the_model(tmp_path: Path, files: list[str], chosen: Any) -> None:
    for number, name in enumerate(files):
        state = {f"w{number}": torch.full((2,), float(number))}
        if name.endswith(".bin"):
            torch.save(state, tmp_path / name)
        else:
            save_file(state, tmp_path / name)
    wanted = files[chosen] if isinstance(chosen, slice) else [files[chosen]]
    assert names_in(tmp_path) == wanted
    read = dcp_pipeline.load_keys(tmp_path, config=CONFIG)
    assert sorted(read) == [f"w{number}" for number in range(len(wanted))]


def test_an_index_is_preferred_to_other_files(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}, 2)
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "other.safetensors")
    assert len(names_in(tmp_path)) == 2
    (tmp_path / INDEX).rename(tmp_path / "diffusion_model.safetensors.index.json")
    assert len(names_in(tmp_path)) == 2
    shutil.copy(tmp_path / "diffusion_model.safetensors.index.json", tmp_path / f"x.{INDEX}")
    with pytest.raises(FormatError, match="several models"):
        opened(tmp_path)


def test_files_in_folders(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "sub" / "w.safetensors")
    (tmp_path / INDEX).write_text(index_of({"w": "sub/w.safetensors"}))
    assert_same(dcp_pipeline.load_keys(tmp_path, config=CONFIG), {"w": torch.ones(2)})
    assert Manifest.decode(opened(tmp_path).encode()).files[0].name == "sub/w.safetensors"


def test_a_cache_is_made_of_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    weight_map = save_shards(blobs, {"a": torch.ones(2), "b": torch.zeros(2)}, 2)
    snapshot.mkdir(parents=True)
    for name in {*weight_map.values(), INDEX}:
        os.rename(blobs / name, blobs / f"hash-of-{name}")
        os.symlink(f"../../blobs/hash-of-{name}", snapshot / name)
    read = dcp_pipeline.load_keys(snapshot, config=CONFIG)
    assert_same(read, {"a": torch.ones(2), "b": torch.zeros(2)})
    assert len(opened(snapshot).files) == 2


def test_from_memory(tmp_path: Path) -> None:
    from dcp_pipeline.storage.memory import MemoryStorage

    save_file({"w": torch.arange(5)}, tmp_path / "it")
    location = f"memory://{tmp_path}"
    MemoryStorage().open(location).put("model.safetensors", (tmp_path / "it").read_bytes())
    config = CONFIG | {"storage": "memory"}
    assert_same(dcp_pipeline.load_keys(location, config=config), {"w": torch.arange(5)})


def torch_writer(path: Path, **settings: Any) -> None:
    state = {"a.w": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    writer = HuggingFaceStorageWriter(str(path), **settings)
    plain_save(state, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"fqn_to_index_mapping": {"a.w": 1, "b": 2}},
        {"save_distributed": True},
        {"save_distributed": True, "enable_consolidation": True},
        {"fqn_to_index_mapping": {"a.w": 1, "b": 2}, "save_distributed": True},
    ],
)
def test_what_torchs_writer_writes(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch_writer(tmp_path, **settings)
    read = dcp_pipeline.load_keys(tmp_path, config=CONFIG)
    wanted = {"a.w": torch.arange(12.0).view(4, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    assert_same(dict(sorted(read.items())), wanted)


def shards(folder: Path, rows: list[tuple[int, int]], name: str = "w") -> None:
    """Rows of a tensor in files as DCP names them."""
    folder.mkdir(exist_ok=True)
    whole = torch.arange(40.0).view(10, 4)
    for number, (begin, end) in enumerate(rows, start=1):
        info = f'{{"{name}": {{"saved_offsets": [{begin}, 0]}}}}'
        save_file(
            {name: whole[begin:end].clone()},
            folder / f"shard-{number:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": info},
        )


@pytest.mark.parametrize("below", ["sharded", "."])
def test_shards_of_dcp(tmp_path: Path, below: str) -> None:
    shards(tmp_path / below, [(0, 3), (3, 4), (4, 10)])
    read = dcp_pipeline.load_keys(tmp_path, config=CONFIG)
    assert_same(read, {"w": torch.arange(40.0).view(10, 4)})
    assert len(opened(tmp_path).table) == 3


@pytest.mark.parametrize("rows", [[(0, 3), (4, 10)], [(0, 5), (4, 10)], [(1, 10)]])
def test_shards_that_do_not_tile(tmp_path: Path, rows: list[tuple[int, int]]) -> None:
    shards(tmp_path, rows)
    with pytest.raises(CorruptCheckpointError, match="w"):
        opened(tmp_path)


def test_shards_with_one_place(tmp_path: Path) -> None:
    shards(tmp_path, [(0, 10), (0, 10)])
    with pytest.raises(FormatError, match=r"at \[0, 0\] is both in shard-00001.* and shard-00002"):
        opened(tmp_path)


@pytest.mark.parametrize(
    "info",
    ["{}", "[]", "{", '{"w": 1}', '{"w": {"saved_offsets": [0]}}',
     '{"w": {"saved_offsets": [0, -1]}}', '{"w": {"saved_offsets": [0, true]}}',
     '{"w": {"saved_offsets": [0, 4611686018427387904]}}',
     '{"w": {"saved_offsets": [0, 0]}, "w": {"saved_offsets": [0, 0]}}'],
)  # fmt: skip
def test_sharding_info_that_is_damaged(tmp_path: Path, info: str) -> None:
    metadata = {"DCP_SHARDING_INFO": info}
    save_file({"w": torch.ones(2, 2)}, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(FormatError, match=r"model\.safetensors: .*"):
        opened(tmp_path)


def bin_state() -> dict[str, Any]:
    base = torch.arange(24.0).view(4, 6)
    flat = torch.arange(10)
    return {
        "base": base,
        "tied": base,
        "same": base.view(4, 6),
        "transposed": base.t(),
        "column": base[:, 1],
        "row": base[2],
        "reshaped": base.view(6, 4),
        "low": flat[:4],
        "high": flat[4:],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "float8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }


def test_a_state_dict_of_torch_save(tmp_path: Path) -> None:
    torch.save(bin_state(), tmp_path / "pytorch_model.bin")
    read = dcp_pipeline.load_keys(tmp_path, config=CONFIG)
    expected = {name: one.detach() for name, one in bin_state().items()}
    assert_same(read, expected)
    manifest = opened(tmp_path)
    aliases = {
        name: manifest.names[spec.alias]
        for name, spec in zip(manifest.names, manifest.table.keys, strict=True)
        if spec.alias >= 0
    }
    assert aliases == {"tied": "base", "same": "base"}
    assert_same(Manifest.decode(manifest.encode()).table.payload, manifest.table.payload)
    part = {name: torch.zeros_like(one) for name, one in expected.items() if one.dim() == 2}
    part["float8"] = torch.zeros(8, dtype=torch.uint8).view(torch.float8_e4m3fn)
    config = CONFIG | {"strict": False}
    dcp_pipeline.load(part, checkpoint_id=tmp_path, config=config)
    assert_same(part, {name: expected[name] for name in part})


def test_a_module_in_parts_of_torch_save(tmp_path: Path) -> None:
    state = torch.nn.Linear(3, 2).state_dict()
    for number, name in enumerate(state):
        torch.save({name: state[name]}, tmp_path / f"pytorch_model-{number}.bin")
    weight_map = {name: f"pytorch_model-{n}.bin" for n, name in enumerate(state)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(index_of(weight_map, total_size=32))
    assert_same(dcp_pipeline.load_keys(tmp_path, config=CONFIG), dict(state))
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert names_in(tmp_path) == ["pytorch_model.bin"]
    assert_same(dcp_pipeline.load_keys(tmp_path, config=CONFIG), dict(state))


@pytest.mark.parametrize(
    ("state", "old", "said"),
    [
        ({"w": torch.ones(2)}, True, "before 1.6"),
        ({"w": {"v": torch.ones(2)}}, False, "a dict where a tensor was expected, under 'w'"),
        ({1: torch.ones(2)}, False, "the key 1"),
        ([torch.ones(2)], False, "a list where a state dict"),
        ({"w": torch.ones(1).expand(10**9)}, False, "do not fit"),
    ],
)
def test_what_is_no_state_dict(tmp_path: Path, state: Any, old: bool, said: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save(state, file, _use_new_zipfile_serialization=not old)
    with pytest.raises(FormatError, match=said):
        opened(tmp_path)
