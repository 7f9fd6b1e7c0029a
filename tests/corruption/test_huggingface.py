"""Hostile and broken repositories of Hugging Face: a named error, in little memory and time."""

import io
import json
import os
import pickle
import random
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

import dcp_pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.huggingface import HuggingFaceLayout
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.corruption.test_fuzz import changed, named, seeds
from tests.huggingface_files import index_of, save_shards
from tests.memory import begin_peak, needs_peak, peak

BYTES, SECONDS = 200e6, 5.0
INDEX = "model.safetensors.index.json"

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def config(dequantize: str = "none") -> dict[str, Any]:
    layout = {"kind": "huggingface", "dequantize": dequantize}
    return {"layout": layout, "serialization": "safetensors"}


def state() -> dict[str, torch.Tensor]:
    codes = torch.arange(64, dtype=torch.uint8)
    return {
        "a.weight": codes.clone().view(8, 8).view(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
        "b_blocks": codes.view(4, 16),
        "b_scales": codes[:4].clone(),
        "c": torch.arange(6.0).view(2, 3),
        "d": torch.tensor(1),
    }


def opened(path: Path, dequantize: str = "none") -> Manifest:
    directory = FileSystemStorage().open(str(path), follow_links=True)
    return HuggingFaceLayout(dequantize).open(directory)


def in_index(text: str | bytes) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        save_file({"w": torch.ones(2)}, path / "w.safetensors")
        (path / INDEX).write_bytes(text.encode() if isinstance(text, str) else text)

    return attack


def stretched(path: Path) -> None:
    with open(path / INDEX, "wb") as file:
        file.truncate(1 << 40)


def as_long_as_is_read(path: Path) -> None:
    """Text of one byte each, and one character that makes all of them need four."""
    (path / INDEX).write_bytes('{"😀": "'.encode() + b" " * (65 << 20) + b'"}')


def one_tensor(info: str) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        metadata = {"DCP_SHARDING_INFO": info}
        save_file({"w": torch.ones(2, 2)}, path / "model.safetensors", metadata=metadata)

    return attack


def header(text: str, payload: int = 0) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        data = struct.pack("<Q", len(text)) + text.encode() + b"\0" * payload
        (path / "model.safetensors").write_bytes(data)

    return attack


def instead_of_a_file(make: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda path: make(path / "model.safetensors") and None


class _Runs:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def zipped(pickled: Callable[[Path], bytes]) -> Callable[[Path], None]:
    def attack(path: Path) -> None:
        with zipfile.ZipFile(path / "pytorch_model.bin", "w") as file:
            file.writestr("archive/data.pkl", pickled(path))
            file.writestr("archive/data/0", b"\0" * 64)

    return attack


def expanded(path: Path) -> bytes:
    """A tensor of 2**62 elements in 64 bytes, by strides of zero."""
    data = io.BytesIO()
    torch.save({"w": torch.zeros(16).as_strided((1 << 20, 1 << 20, 1 << 20), (0, 0, 0))}, data)
    return zipfile.ZipFile(data).read("archive/data.pkl")


MANY = json.dumps({"weight_map": {str(number): "w" for number in range(1_000_000)}})
ATTACKS: dict[str, Callable[[Path], None]] = {
    "index_is_deep": in_index('{"metadata": ' + "[" * 500_000),
    "index_is_deeper": in_index('{"metadata": ' + '{"a":' * 200_000 + "1" + "}" * 200_001),
    "index_of_many_lists": in_index('{"metadata": [' + "[]," * 20_000_000),
    "index_of_many_numbers": in_index('{"metadata": [' + "1.5," * 10_000_000),
    "index_of_many_keys": in_index(MANY),
    "index_of_a_long_number": in_index('{"metadata": {"total_size": ' + "9" * 10_000_000 + "}}"),
    "index_is_stretched": stretched,
    "index_of_wide_text": as_long_as_is_read,
    "index_is_a_device": lambda path: os.symlink("/dev/zero", path / INDEX),
    "index_is_a_pipe": lambda path: os.mkfifo(path / INDEX),
    "info_is_deep": one_tensor('{"w": ' + "[" * 500_000),
    "info_of_many_lists": one_tensor('{"w": [' + "[]," * 5_000_000),
    "place_is_far_away": one_tensor('{"w": {"saved_offsets": [4611686018427387903, 0]}}'),
    "place_leaves_a_gap": one_tensor('{"w": {"saved_offsets": [1000000000, 0]}}'),
    "header_claims_much": header('{"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":'
                                 "[0,4398046511104]}}"),
    "empty_and_absurd": header('{"w":{"dtype":"F32","shape":[0,9223372036854775807],'
                               '"data_offsets":[0,0]}}'),
    "model_is_a_device": instead_of_a_file(lambda path: os.symlink("/dev/zero", path)),
    "model_is_a_pipe": instead_of_a_file(os.mkfifo),
    "model_is_a_folder": instead_of_a_file(lambda path: path.mkdir()),
    "model_is_a_loop": instead_of_a_file(lambda path: os.symlink(path, path)),
    "pickle_runs_code": zipped(lambda path: pickle.dumps({"w": _Runs(path / "made")}, 2)),
    "pickle_of_many_lists": zipped(lambda path: b"\x80\x02" + b"]" * (30 << 20) + b"."),
    "pickle_of_many_marks": zipped(lambda path: b"\x80\x02" + b"(" * (30 << 20) + b"."),
    "pickle_is_long": zipped(lambda path: b"\x80\x02" + b"N" * (33 << 20) + b"."),
    "tensor_of_nothing": zipped(expanded),
}  # fmt: skip


@needs_peak
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_refused(tmp_path: Path, name: str) -> None:
    ATTACKS[name](tmp_path)
    before, started = begin_peak(), time.process_time()
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path)
    seconds, grown = time.process_time() - started, peak() - before
    assert len(str(caught.value)) < 2000
    assert not (tmp_path / "made").exists(), "code of the file was run"
    assert grown < BYTES, (name, grown)
    assert seconds < SECONDS, (name, seconds)


def good(kind: str, path: Path) -> None:
    if kind == "bin":
        tensors = state()
        torch.save(tensors | {"e": tensors["c"].t(), "f": tensors["c"]}, path / "pytorch_model.bin")
    elif kind == "index":
        save_shards(path, state(), 2)
        text = json.dumps({"quantization_config": {"weight_block_size": [8, 8]}})
        (path / "config.json").write_text(text)
    else:
        places = {name: {"saved_offsets": [0] * one.dim()} for name, one in state().items()}
        metadata = {"DCP_SHARDING_INFO": json.dumps(places)}
        save_file(state(), path / "model.safetensors", metadata=metadata)


@pytest.mark.parametrize("kind", ["bin", "index", "safetensors"])
@pytest.mark.parametrize("seed", seeds(1, 40))
def test_changed_files(tmp_path: Path, kind: str, seed: int) -> None:
    good(kind, tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.iterdir()}
    chance, worked = random.Random(seed), 0
    for _ in range(120):
        for file, data in files.items():
            file.write_bytes(data if chance.random() < 0.5 else changed(chance, data))
        dequantize = chance.choice(["none", "bfloat16"])
        manifest = named(lambda: opened(tmp_path, dequantize))  # noqa: B023
        if manifest is not None:
            worked += 1
            assert named(lambda: Manifest.decode(manifest.encode())) is not None  # noqa: B023
        if chance.random() < 0.15:
            named(lambda: dcp_pipeline.load_keys(tmp_path, config=config(dequantize)))  # noqa: B023
            named(lambda: dcp_pipeline.load(state(), checkpoint_id=tmp_path, config=config()))
    assert worked > 3


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_changed_members_of_an_index(tmp_path: Path, seed: int) -> None:
    weight_map = save_shards(tmp_path, state(), 2)
    chance = random.Random(seed)
    junk = [None, True, 0, 1 << 70, 0.5, "", "x", "../x", "/x", "a/b", "\0", "\ud800", [], {}, ".",
            "model-00001-of-00002.safetensors", "config.json", INDEX]  # fmt: skip
    for _ in range(150):
        members: dict[str, Any] = json.loads(index_of(weight_map, total_size=1))
        part = chance.choice([members, members["weight_map"], members["metadata"]])
        key = chance.choice([*part, "new", "\ud800", ""])
        if chance.random() < 0.3:
            part.pop(key, None)
        else:
            part[key] = chance.choice(junk)
        (tmp_path / INDEX).write_text(json.dumps(members))
        named(lambda: opened(tmp_path, chance.choice(["none", "float32"])))


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_changed_sizes_of_codes_and_scales(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        tensors = {}
        for name, one in state().items():
            sizes = [chance.choice([0, 1, 2, 8, 16]) for _ in range(chance.randint(0, 4))]
            keep = chance.random() < 0.5
            tensors[name] = one if keep else torch.zeros(sizes).to(one.dtype)
        (tmp_path / "model.safetensors").write_bytes(save(tensors))
        manifest = named(lambda: opened(tmp_path, "float16"))
        if manifest is not None:
            again = Manifest.decode(manifest.encode())
            assert again.quantized == manifest.quantized
            dcp_pipeline.load_keys(tmp_path, config=config("float16"))
