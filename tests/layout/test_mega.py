"""Layout ``mega``: repositories of MEGA files, anybody's, are read as checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import dcp_pipeline
from dcp_pipeline import CheckpointException
from dcp_pipeline.core.errors import (
    ChecksumError,
    CorruptCheckpointError,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.mega import MegaLayout
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.types.dtypes import DTYPES
from tests import mega_files as forge
from tests.mega_files import FLOATS, SAMPLES, chunk, entry, mega

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MEGA = {"layout": "mega", "serialization": "mega"}


def manifest_of(folder: Path) -> Manifest:
    return MegaLayout().open(FileSystemStorage().open(str(folder)))


def put(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder


def sample(folder: Path, name: str) -> Path:
    return put(folder, f"{name}.mega", (SAMPLES / f"{name}.mega").read_bytes())


def load(folder: Path, template: dict[str, Any], **config: Any) -> Any:
    return dcp_pipeline.load(template, checkpoint_id=folder, config=MEGA | config)


def causes(error: CheckpointException) -> list[BaseException]:
    return [cause for cause, _ in error.failures.values()]


# Repositories of others


def test_a_single_file_of_any_name_is_read(tmp_path: Path) -> None:
    loaded = dcp_pipeline.load_keys(sample(tmp_path, "two_crc32_sha256"), config=MEGA)
    assert torch.equal(loaded["w.a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded["w.b"], torch.arange(4))
    assert loaded["metadata"] == {
        "general.architecture": "demo",
        "n.u64": 1 << 40,
        "flag": True,
        "strs": ["x", "y"],
        "ints": [1, 2],
    }


@pytest.mark.parametrize("kind", ["converted_none", "converted_zstd"])
def test_shards_with_an_index_that_has_absolute_paths_are_read_beside_it(
    tmp_path: Path, kind: str
) -> None:
    shutil.copytree(SAMPLES / kind, tmp_path / kind)
    template = {
        "zeros": torch.ones(64, 64),
        "ar": torch.ones(1024),
        "one": torch.zeros(2, dtype=torch.bfloat16),
    }
    report = load(tmp_path / kind, template)
    assert torch.equal(template["zeros"], torch.zeros(64, 64))
    assert torch.equal(template["ar"], torch.arange(1024.0))
    assert not report.is_verified


@pytest.mark.parametrize("tables", [["weight_map"], ["shards"], ["weight_map", "shards"]])
def test_either_table_of_an_index_is_enough(tmp_path: Path, tables: list[str]) -> None:
    put(tmp_path, "one.mega", mega([entry("a")], FLOATS))
    put(tmp_path, "two.mega", mega([entry("b")], FLOATS))
    files = {"a": "one.mega", "b": "two.mega"}
    index = {"weight_map": files, "shards": {name: name for name in files.values()}}
    kept = {table: index[table] for table in tables}
    put(tmp_path, "model.mega.index.json", json.dumps(kept).encode())
    assert set(dcp_pipeline.load_keys(tmp_path, config=MEGA)) == {"a", "b"}


def test_shards_without_an_index_are_read_when_all_are_there(tmp_path: Path) -> None:
    put(tmp_path, "m-00001-of-00002.mega", mega([entry("a")], FLOATS))
    with pytest.raises(CorruptCheckpointError, match="1 of the 2 shards of 'm'"):
        manifest_of(tmp_path)
    put(tmp_path, "m-00002-of-00002.mega", mega([entry("b")], FLOATS))
    assert set(manifest_of(tmp_path).names) == {"a", "b"}


def test_the_last_footer_is_what_is_loaded(tmp_path: Path) -> None:
    loaded = dcp_pipeline.load_keys(sample(tmp_path, "overlay"), config=MEGA)
    assert loaded["metadata"] == {"general.architecture": "demo", "k2": "v2"}


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    loaded = dcp_pipeline.load_keys(sample(tmp_path, "scalar_empty"), config=MEGA)
    assert loaded["s"].shape == () and loaded["e"].shape == (0, 4)
    assert loaded["e"].dtype == torch.bfloat16


def test_metadata_keep_out_of_the_way_of_tensors(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", mega([entry("metadata")], FLOATS, {"metadata": 5}))
    loaded = dcp_pipeline.load_keys(tmp_path, config=MEGA)
    assert loaded["metadata"].shape == (2, 3) and loaded["metadata_"] == {"metadata": 5}


CODES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32",
    "uint32": "U32", "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


@pytest.mark.parametrize("how", ["raw", "checksum", "shuffled", "zstd", "shuffled zstd"])
def test_every_dtype_comes_bit_by_bit(tmp_path: Path, how: str) -> None:
    entries, payload, expected = [], b"", {}
    for name, code in CODES.items():
        dtype = DTYPES[name]
        raw = torch.arange(12 * dtype.itemsize).remainder(2).to(torch.uint8)
        expected[name] = raw.view(dtype).view(3, 4)
        stored = raw.numpy().tobytes()
        if "shuffled" in how:
            stored = forge.shuffle(stored, dtype.itemsize)
        if "zstd" in how:
            stored = zstandard.compress(stored)
        coding = {
            "flags": 2 * ("shuffled" in how) + ("zstd" in how),
            "codec": int("zstd" in how),
            "shuffle": dtype.itemsize if "shuffled" in how else None,
            "checksum": forge.sha(stored) if how == "checksum" else None,
        }
        shape = (3, 8) if code == "F4" else (3, 4)
        entries.append(entry(name, shape, code, len(payload), stored=len(stored), **coding))
        payload += stored
    put(tmp_path, "model.mega", mega(entries, payload))
    template = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    load(tmp_path, template)
    for name, tensor in expected.items():
        assert torch.equal(template[name].view(torch.uint8), tensor.view(torch.uint8)), name


# Encoded rows


def chunked(sizes: list[int], compress: bool = False) -> bytes:
    """``x`` float32 [8, 6] in chunks of so many bytes, stored the other way round."""
    whole = torch.arange(48.0).numpy().tobytes()
    begin, rows, payload = 0, [], b""
    parts = []
    for size in sizes:
        parts.append((begin, whole[begin : begin + size]))
        begin += size
    for number, (start, part) in reversed(list(enumerate(parts))):
        stored = zstandard.compress(part) if compress else part
        coding = {"codec": 1, "flags": 1} if compress else {}
        rows.append(
            chunk(0, number, start, len(part), len(payload), len(stored),
                  checksum=forge.crc(stored), **coding)
        )  # fmt: skip
        payload += stored
    assert begin == len(whole)
    return mega([entry("x", (8, 6), storage="chunked_raw_dense")], payload, None, rows)


CUTS = {
    "one": [192],
    "rows": [48, 72, 72],
    "within rows": [20, 100, 4, 68],
    "within elements": [21, 100, 3, 68],
    "single bytes": [1] * 192,
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_boxes_of_chunked_tensors(tmp_path: Path, cut: str, compress: bool) -> None:
    put(tmp_path, "model.mega", chunked(CUTS[cut], compress))
    expected = torch.arange(48.0).view(8, 6)
    boxes = [(0, 8, 0, 6), (2, 3, 0, 6), (0, 8, 1, 2), (3, 4, 2, 4), (7, 1, 5, 1)]
    manifest = manifest_of(tmp_path)
    for top, height, left, width in boxes:
        for memory in (torch.full((height, width), -1.0), torch.full((width, height), -1.0).t()):
            read_box(tmp_path, manifest, (top, left), memory)
            assert torch.equal(memory, expected[top : top + height, left : left + width])
    template = {"x": torch.zeros(8, 6)}
    report = load(tmp_path, template)
    assert torch.equal(template["x"], expected) and report.is_verified


def read_box(
    folder: Path, manifest: Manifest, offsets: tuple[int, ...], memory: torch.Tensor
) -> list[Any]:
    from dcp_pipeline.pipelines.steps.data_files import DataFiles
    from dcp_pipeline.pipelines.steps.read_boxes import CastCounts, box_reads
    from dcp_pipeline.pipelines.steps.read_items import locate_rows
    from dcp_pipeline.state.targets import TensorTarget
    from dcp_pipeline.types.entries import Piece

    piece = Piece(offsets, tuple(memory.shape), memory)
    target = TensorTarget("x", 0, "float32", (piece,))
    directory = FileSystemStorage().open(str(folder))
    with DataFiles(manifest, directory, 1) as files:
        located = locate_rows(manifest, [0], files.source)
        reads = list(box_reads(located, range(1), target, CastCounts()))
        files.run({0: [read for _, read in reads]})
    return [read for _, read in reads]


def test_a_part_touches_its_chunks_alone(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", chunked([48, 48, 48, 48]))
    reads = read_box(tmp_path, manifest_of(tmp_path), (2, 0), torch.zeros(2, 6))
    assert [read.length for read in reads] == [48]


@pytest.mark.parametrize("rollback", ["copy", "verify_first", "none"])
@pytest.mark.parametrize("compress", [False, True])
def test_a_damaged_chunk_is_named_and_nothing_is_changed(
    tmp_path: Path, compress: bool, rollback: str
) -> None:
    data = bytearray(chunked([48, 48, 96], compress))
    data[-3] ^= 1  # of the first chunk, which lies last
    put(tmp_path, "model.mega", bytes(data))
    template = {"x": torch.full((8, 6), -1.0)}
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, template, rollback=rollback)
    (cause,) = causes(caught.value)
    assert isinstance(cause, ChecksumError)
    assert "model.mega, x is damaged" in str(cause)
    if rollback != "none":
        assert torch.equal(template["x"], torch.full((8, 6), -1.0))
    put(tmp_path, "model.mega", bytes(data))
    if not compress:
        load(tmp_path, template, layout={"kind": "mega", "verify": False})
        assert template["x"][7, 5] == 47


def test_a_damaged_sample_names_file_and_key(tmp_path: Path) -> None:
    sample(tmp_path, "two_corrupt_payload")
    template = {"w.a": torch.zeros(2, 3), "w.b": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(CheckpointException, match=r"two_corrupt_payload\.mega, w\.a is damaged"):
        load(tmp_path, template)
    assert not template["w.a"].any() and not template["w.b"].any()
    load(tmp_path, {"w.b": template["w.b"]}, strict=False)
    assert torch.equal(template["w.b"], torch.arange(4))


def test_casts_count_what_does_not_fit(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", chunked([21, 100, 3, 68]))
    template = {"x": torch.zeros(8, 6, dtype=torch.int8)}
    load(tmp_path, template, casts=["x"])
    assert torch.equal(template["x"], torch.arange(48, dtype=torch.int8).view(8, 6))


def test_a_manifest_with_encoded_rows_travels(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", chunked([48, 48, 96], compress=True))
    manifest = manifest_of(tmp_path)
    found = Manifest.decode(manifest.encode())
    assert found.encoded == manifest.encoded and len(found.encoded[0]) == 3
