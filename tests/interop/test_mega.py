"""The MEGA format with its reference library, both ways; skipped where that is not installed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dcp_pipeline
from dcp_pipeline.types.dtypes import DTYPES
from tests import mega_files as forge
from tests.mega_files import SAMPLES

megatensors = pytest.importorskip("megatensors", exc_type=ImportError)
cpp = pytest.importorskip("megatensors.cpp", exc_type=ImportError)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MEGA = {"layout": "mega"}
DTYPE_NAMES = [
    name for name in DTYPES if not name.startswith("complex") and not name.endswith("fnuz")
]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def tensors() -> dict[str, torch.Tensor]:
    found = {}
    for seed, name in enumerate(DTYPE_NAMES):
        torch.manual_seed(seed)
        high = 2 if name == "bool" else 256
        raw = torch.randint(0, high, (6, 5, DTYPES[name].itemsize), dtype=torch.uint8)
        found[name] = raw.view(DTYPES[name]).reshape(6, 5)
    return found | {
        "large": torch.arange(30_000.0),
        "zeros": torch.zeros(50, 40),
        "scalar": torch.tensor(3.0),
    }


def theirs(*files: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = megatensors.load_state_dict(
        [str(file) for file in files], nogds=True
    )
    return loaded


def parsed(path: Path) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found: dict[str, Any] = cpp.parse_metadata_fd(descriptor, str(path), path.stat().st_size)
        return found
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("packing", ["raw", "zstd", "shuffled"])
@pytest.mark.parametrize("checksum", ["none", "crc32", "sha256"])
@pytest.mark.parametrize("layout", ["mega", "dcp"])
def test_they_open_what_we_write(tmp_path: Path, layout: str, checksum: str, packing: str) -> None:
    serialization: dict[str, Any] = {"kind": "mega", "checksum": checksum, "chunk_bytes": "64KiB"}
    if packing != "raw":
        serialization |= {"compression": "zstd", "shuffle": packing == "shuffled"}
    settings = {"layout": layout, "serialization": serialization}
    state = tensors()
    saved = {**state, "step": 3, "names": ["a", "b"], "pair": (1, 2)}
    dcp_pipeline.save(saved, checkpoint_id=tmp_path, config=settings)
    (path,) = tmp_path.glob("*.mega")
    found = theirs(path)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name
    header = parsed(path)
    assert header["metadata"]["step"] == 3 and header["metadata"]["names"] == ["a", "b"]
    assert header["footer_overlay"]["present"] == (layout == "mega")
    records = {record[0]: record for record in header["tensor_records"]}
    if packing != "raw":
        assert records["zeros"][6] < 8000 and records["zeros"][7] == 1 + 2 * (packing != "zstd")
    if checksum != "none":
        kind = {"crc32": 1, "sha256": 2}[checksum]
        assert records["float32"][10] == kind
        assert {row[8] for row in records["large"][13]} == {kind}


def test_they_open_our_index(tmp_path: Path) -> None:
    """Of shards, with the paths in it relative."""
    from dcp_pipeline.layout.mega_index import encode_index

    state = tensors()
    names = sorted(state)
    parts = {"model-00001-of-00002.mega": names[:9], "model-00002-of-00002.mega": names[9:]}
    for file, keys in parts.items():
        folder = tmp_path / "one"
        one = {key: state[key] for key in keys}
        dcp_pipeline.save(one, checkpoint_id=folder, config=MEGA | {"overwrite": "replace"})
        (folder / "model.mega").rename(tmp_path / file)
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    (tmp_path / "model.mega.index.json").write_bytes(encode_index(weight_map, list(parts), {}))
    found = theirs(*map(Path, megatensors.resolve_artifacts(tmp_path / "model.mega.index.json")))
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }


@pytest.mark.parametrize("checksum", [0, 1, 2])
@pytest.mark.parametrize("alignment", [32, 4096])
def test_we_open_what_their_writer_writes(tmp_path: Path, alignment: int, checksum: int) -> None:
    state = {name: tensor for name, tensor in tensors().items() if "float4" not in name}
    records, offset = [], 0
    codes = {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
             "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}  # fmt: skip
    for name, tensor in state.items():
        raw = bits(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        short = dtype.replace("uint", "U").replace("int", "I").replace("float", "F")
        record: dict[str, Any] = {
            "name": name, "shape": list(tensor.shape), "logical_dtype": codes.get(dtype, short),
            "storage_format": "raw_dense", "payload_offset": offset, "logical_nbytes": len(raw),
            "stored_nbytes": len(raw), "data": raw,
        }  # fmt: skip
        if checksum:
            kind, digest = (forge.crc if checksum == 1 else forge.sha)(raw)
            record |= {"checksum_type": kind, "checksum": digest}
        source = tmp_path / "source.bin"
        with source.open("ab") as file:
            record |= {"src_filename": str(source), "src_offset": file.tell()}
            file.write(raw)
        records.append(record)
        offset += len(raw)
    metadata = {"mega.tensor_info.format": "self_describing", "general.alignment": alignment,
                "general.architecture": "demo", "n": 5, "b": True, "t": ["a"]}  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    cpp.write_file(str(folder / "model.mega"), records, metadata, alignment)
    template = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in state.items()}
    dcp_pipeline.load(template, checkpoint_id=folder, config=MEGA)
    assert {k: bits(t) for k, t in template.items()} == {k: bits(t) for k, t in state.items()}
    kept = dcp_pipeline.load_keys(folder, ["metadata"], config=MEGA)["metadata"]
    assert kept == {"general.architecture": "demo", "n": 5, "b": True, "t": ["a"]}


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_we_open_what_they_convert(tmp_path: Path, compression: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    convertible = ("float32", "bfloat16", "float16", "int64", "uint8", "large", "scalar")
    state = {name: tensor for name, tensor in tensors().items() if name in convertible}
    state["zeros"] = torch.zeros(300, 40)
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "demo"}))
    folder = tmp_path / "converted"
    megatensors.convert_model(source, folder, max_shard_size=40_000, compression=compression)
    template = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in state.items()}
    dcp_pipeline.load(template, checkpoint_id=folder, config=MEGA)
    assert {k: bits(t) for k, t in template.items()} == {k: bits(t) for k, t in state.items()}


def test_we_agree_on_the_samples() -> None:
    """Shuffled and chunked ones too, which their writer does not make."""
    for name in ("minimal", "two_crc32_sha256", "shuffled_sha256", "chunked_crc32", "overlay"):
        path = SAMPLES / f"{name}.mega"
        assert theirs(path).keys() == {record[0] for record in parsed(path)["tensor_records"]}


def test_their_footer_is_read(tmp_path: Path) -> None:
    dcp_pipeline.save({"w": torch.ones(3), "k": 1}, checkpoint_id=tmp_path, config=MEGA)
    before = dcp_pipeline.load_keys(tmp_path, config=MEGA)
    # The last footer alone counts, so theirs takes the place of ours: the state is flat then.
    cpp.append_footer_overlay_file(str(tmp_path / "model.mega"), {"added": "x"}, 2)
    after = dcp_pipeline.load_keys(tmp_path, config=MEGA)
    assert torch.equal(before["w"], after["w"])
    assert after["metadata"] == {"k": 1, "added": "x"}
