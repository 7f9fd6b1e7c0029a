"""``docs/format.md`` is enough to write a reader from: this one uses nothing of the package.

`FormatReader` knows only what the document says, and needs the standard library and NumPy.
"""

import base64
import hashlib
import json
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_pipeline.pipeline import Pipeline
from tests.distributed.pool import Pool

SIZES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2",
    2: "int16 uint16 float16 bfloat16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
ITEM_SIZE = {name: size for size, names in SIZES.items() for name in names.split()}


class FormatReader:
    """Reads tensors of a checkpoint in a directory; CRCs are verified, other digests are not."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest = json.loads((directory / "manifest.json").read_bytes())
        assert self.manifest["format"] == "dcp_pipeline.checkpoint"
        assert self.manifest["version"][0] == 1
        metadata, named = directory / ".metadata", self.manifest["metadata"]
        assert metadata.exists() == (named is not None)
        assert named is None or metadata.stat().st_size == named["size"]
        self.keys = {key["name"]: (at, key) for at, key in enumerate(self.manifest["keys"])}
        self.columns = unpack(base64.b64decode(self.manifest["chunks"]["packed"]))
        assert all(len(c) == self.manifest["chunks"]["count"] for c in self.columns.values())
        if self.manifest["checksum"]["algorithm"] == "crc32":
            self.verify()

    def rows(self, name: str) -> list[int]:
        """The rows of the chunks of a key, or of the key whose storage it shares."""
        at, key = self.keys[name]
        return np.flatnonzero(self.columns["key"] == key.get("alias", at)).tolist()

    def read(self, row: int, skip: int, nbytes: int) -> bytes:
        """Bytes of the item of a row."""
        name, size = self.manifest["files"][self.columns["file"][row]]
        assert os.path.basename(name) == name and (self.directory / name).stat().st_size == size
        with open(self.directory / name, "rb") as file:
            file.seek(int(self.columns["offset"][row]) + skip)
            return file.read(nbytes)

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor; each element is as many raw bytes as its dtype has."""
        key = self.keys[name][1]
        width, shape = ITEM_SIZE[key["dtype"]], key["shape"]
        whole = np.zeros(shape, f"V{width}")
        filled = np.zeros(shape, bool)
        for row in self.rows(name):
            low = self.columns["offsets"][row][: len(shape)]
            extent = self.columns["sizes"][row][: len(shape)]
            nbytes = math.prod(extent.tolist()) * width
            data = self.read(row, int(self.columns["payload"][row]), nbytes)
            box = tuple(slice(a, a + n) for a, n in zip(low, extent, strict=True))
            assert not filled[box].any()
            filled[box] = True
            whole[box] = np.frombuffer(data, f"V{width}").reshape(extent.tolist())
        assert filled.all()
        return whole

    def value(self, name: str) -> Any:
        """A value that was stored as typed JSON, as far as this test needs it."""
        (row,) = self.rows(name)
        return untyped(json.loads(self.read(row, 0, int(self.columns["length"][row]))))

    def verify(self) -> None:
        """Every block of every data file."""
        sizes = dict(self.manifest["files"])
        for name, size, digest in self.manifest["sums"]:
            data = (self.directory / name).read_bytes()
            assert (len(data), f"{zlib.crc32(data):08x}", data[:8]) == (size, digest, b"DCPSUMS1")
            (length,) = struct.unpack_from("<I", data, 8)
            header, at = json.loads(data[12 : 12 + length]), 12 + length
            for file, file_size in header["files"]:
                assert sizes.pop(file) == file_size
                content = (self.directory / file).read_bytes()
                for start in range(0, file_size, header["block_bytes"]):
                    block = content[start : start + header["block_bytes"]]
                    assert data[at : at + 4] == zlib.crc32(block).to_bytes(4, "big")
                    at += 4
            assert at == len(data)
        assert not sizes

    def check_fingerprint(self, largest: int = 50_000) -> int:
        """Whether the fingerprint is of the values; how many keys were compared."""
        found = self.manifest["fingerprint"]
        assert found["algorithm"] == "crc64nvme"
        numbers = struct.unpack(f"<{len(self.keys)}Q", base64.b64decode(found["keys"]))
        lines, compared = [], 0
        for (name, (_, key)), number in zip(self.keys.items(), numbers, strict=True):
            if "dtype" not in key:
                assert number
            elif math.prod(key["shape"]) <= largest:
                assert crc64(self.tensor(name).tobytes()) == number, name
                compared += 1
            kind, dtype, shape = key.get("kind", "tensor"), key.get("dtype"), key.get("shape")
            line = [key["path"], kind, dtype, shape, f"{number:016x}"]
            lines.append(json.dumps(line, separators=(",", ":")))
        whole = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()
        assert whole == found["state"]
        return compared


def crc64(data: bytes) -> int:
    """CRC-64/NVME, a byte at a time."""
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    state = (1 << 64) - 1
    for byte in data:
        state = state >> 8 ^ table[(state ^ byte) & 0xFF]
    return state ^ (1 << 64) - 1


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Packed columns."""
    (length,) = struct.unpack_from("<I", data)
    columns, at = {}, 4 + length
    for name, shape, width, nbytes in json.loads(data[4 : 4 + length]):
        planes = np.frombuffer(zlib.decompress(data[at : at + nbytes]), np.uint8)
        numbers = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<i{width}")
        columns[name] = np.cumsum(numbers.reshape(shape), axis=0, dtype=np.int64)
        at += nbytes
    return columns


def untyped(tree: Any) -> Any:
    """Lists, tuples, mappings and plain values of typed JSON."""
    if isinstance(tree, dict) and list(tree) == ["$tuple"]:
        return tuple(map(untyped, tree["$tuple"]))
    return [untyped(item) for item in tree] if isinstance(tree, list) else tree


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor, row-major."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    tied = torch.randn(70, 30)
    tensors: dict[str, Any] = {
        f"of_{name}": torch.randint(0, 2, (3, 5 * ITEM_SIZE[name]), dtype=torch.uint8).view(
            getattr(torch, name)
        )
        for name in ITEM_SIZE
    }
    tensors |= {
        "tied": tied,
        "tied too": tied,
        "strided": torch.randn(40, 30).t(),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        "large": torch.randn(700, 900),
    }
    values = {"step": 7, "betas": (0.9, 0.999), "names": ["a", None, True]}
    return {"tensors": tensors, "values": values, "array": np.arange(6).reshape(2, 3)}


OVERRIDES = [
    "serialization=torch_save",
    "serialization=safetensors",
    "layout.checksum=crc32",
    "layout.metadata=false",
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_the_document_is_enough_to_read_a_checkpoint(tmp_path: Path, override: str) -> None:
    saved = state()
    with Pipeline.from_recipe("tiny_decoder", [override, "storage.thread_count=3"]) as pipeline:
        pipeline.save(saved, tmp_path)
    reader = FormatReader(tmp_path)
    for name, tensor in saved["tensors"].items():
        found = reader.tensor(f"tensors.{name}")
        assert found.shape == tuple(tensor.shape)
        assert found.tobytes() == raw(tensor), name
    assert reader.tensor("array").tobytes() == saved["array"].tobytes()
    if "safetensors" in override:
        assert {n: reader.value(f"values.{n}") for n in saved["values"]} == saved["values"]
    assert reader.check_fingerprint() >= len(saved["tensors"])


def save_sharded(path: Path, overrides: list[str]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = whole_tensors()
    placements = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}
    sharded = {n: distribute_tensor(t, mesh, [placements[n]]) for n, t in whole.items()}
    with Pipeline.from_recipe("tiny_decoder", overrides) as pipeline:
        pipeline.save(sharded, path)


def whole_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(101, 67) for name in ("rows", "columns", "replicated")}


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_it_is_enough_for_what_several_ranks_have_saved(
    ranks: Pool, tmp_path: Path, serialization: str
) -> None:
    overrides = [f"serialization={serialization}", "layout.checksum=crc32"]
    ranks(3).run(save_sharded, tmp_path, overrides)
    reader = FormatReader(tmp_path)
    assert reader.manifest["world_size"] == 3
    for name, tensor in whole_tensors().items():
        assert len(reader.rows(name)) == 3, name
        assert reader.tensor(name).tobytes() == raw(tensor)
    assert reader.check_fingerprint() == 3
