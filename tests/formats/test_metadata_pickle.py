"""``.metadata`` of plain DCP is read as pickle reads it, and nothing it names runs."""

import io
import os
import pickle
import pickletools
import random
import struct
import time
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.formats.metadata_pickle import read_metadata, write_metadata

pytestmark = pytest.mark.filterwarnings("ignore")  # plain DCP warns that it runs on one rank


def sample(tensors: int = 2, chunks: int = 3) -> Metadata:
    state, storage = {}, {}
    for at in range(tensors):
        key = f"model.layers.{at}.weight"
        places = [torch.Size((512 * n, 0)) for n in range(chunks)]
        size = torch.Size((512, 4096))
        state[key] = TensorStorageMetadata(
            TensorProperties(torch.bfloat16, requires_grad=True),
            torch.Size((512 * chunks, 4096)),
            [ChunkStorageMetadata(place, size) for place in places],
        )
        for n, place in enumerate(places):
            storage[MetadataIndex(key, place, n)] = _StorageInfo(f"__{n}_0.distcp", at << 33, 99)
    state["step"] = BytesStorageMetadata()
    storage[MetadataIndex("step")] = _StorageInfo("sub/dir/..x", 0, 3, ["zstd"])
    plan = {"step": ("a", 0, None), "x": OrderedDict(y={1, 2}), "z": [b"b", 1.5, frozenset({3})]}
    return Metadata(state, plan, storage, StorageMeta("/a/b", "save", "load", ["m"]), "1.0.0")


def test_what_plain_dcp_saves_is_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    expected = pickle.loads(data)
    found = read_metadata(data)
    assert found.storage_meta.checkpoint_id == PurePosixPath(tmp_path)
    expected.storage_meta.checkpoint_id = PurePosixPath(tmp_path)
    assert found == expected and found.state_dict_metadata


def test_plain_dcp_reads_what_we_write(tmp_path):
    dcp.save({"a": torch.arange(5.0)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    path.write_bytes(write_metadata(read_metadata(path.read_bytes())))
    target = {"a": torch.zeros(5)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["a"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol):
    expected = sample()
    data = pickle.dumps(expected, protocol)
    for form in (data, pickletools.optimize(data)):
        found = read_metadata(form)
        assert found == expected
        assert [index.index for index in found.storage_data] == [0, 1, 2, 0, 1, 2, None]
        info = found.storage_data[MetadataIndex("step")]
        assert type(info) is _StorageInfo and info.transform_descriptors == ["zstd"]
    assert read_metadata(write_metadata(expected)) == expected


def test_scalars_and_many_dimensions():
    for shape in ((), (1,), (2, 3, 4), (1, 2, 3, 4, 5), (2**40, 3)):
        size = torch.Size(shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
        expected = Metadata({"a": TensorStorageMetadata(TensorProperties(), size, [chunk] * 2)})
        for protocol in (2, 4):
            assert read_metadata(pickle.dumps(expected, protocol)) == expected


def test_all_dtypes_layouts_and_memory_formats():
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    state = {}
    for at, dtype in enumerate(sorted(dtypes, key=str)):
        properties = TensorProperties(
            dtype,
            [torch.strided, torch.sparse_coo][at % 2],
            memory_format=[torch.contiguous_format, torch.channels_last, torch.preserve_format][
                at % 3
            ],
        )
        state[str(dtype)] = TensorStorageMetadata(properties, torch.Size([1]), [])
    assert read_metadata(write_metadata(Metadata(state))) == Metadata(state)


def test_old_sharded_tensor_properties():
    old = TensorStorageMetadata(OldProperties(torch.float16), torch.Size([1]), [])
    found = read_metadata(pickle.dumps(Metadata({"a": old})))
    assert found.state_dict_metadata["a"].properties == TensorProperties(torch.float16)


def test_paths_and_further_attributes():
    metadata = sample()
    metadata.storage_meta.checkpoint_id = Path("/x/y")
    metadata.save_id_of_ours = {"a": [1]}
    next(iter(metadata.storage_data.values())).crc = 7
    data = pickle.dumps(metadata)
    found = read_metadata(data)
    assert found.storage_meta.checkpoint_id == PurePosixPath("/x/y")
    assert found.save_id_of_ours == {"a": [1]}
    assert next(iter(found.storage_data.values())).crc == 7
    moved = data.replace(b"\x8c\x07pathlib", b"\x8c\x0epathlib._local")
    frameless = moved[:2] + moved[11:]  # the length of the frame is no longer right
    assert read_metadata(frameless).storage_meta.checkpoint_id == PurePosixPath("/x/y")


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "..", "", "a\\..\\b", "C:x", "a\0b"]
)
def test_files_out_of_the_checkpoint(path):
    metadata = sample()
    metadata.storage_data[MetadataIndex("step")].relative_path = path
    with pytest.raises(UnsafeCheckpointError, match="out of the checkpoint"):
        read_metadata(write_metadata(metadata))


def edit(metadata: Metadata, what: str) -> None:
    tensor = next(iter(metadata.state_dict_metadata.values()))
    index, info = next(iter(metadata.storage_data.items()))
    match what:
        case "negative offset":
            info.offset = -1
        case "huge length":
            info.length = 1 << 70
        case "bool offset":
            info.offset = True
        case "other dimensions":
            tensor.chunks[0].sizes = torch.Size([1])
        case "chunk of another size":
            tensor.chunks[1] = ChunkStorageMetadata(torch.Size([1]), torch.Size([1]))
        case "no chunk":
            tensor.chunks[1] = "chunk"
        case "tuple size":
            tensor.size = (1, 2)
        case "no dtype":
            tensor.properties.dtype = 3
        case "key":
            metadata.state_dict_metadata[3] = BytesStorageMetadata()
        case "item":
            metadata.state_dict_metadata["a"] = 3
        case "index":
            metadata.storage_data["a"] = info
        case "info":
            metadata.storage_data[index] = "file"
        case "dunder":
            info.__dict__["__reduce__"] = 1
        case "version":
            metadata.version = 3
        case "transforms":
            info.transform_descriptors = "zstd"


@pytest.mark.parametrize(
    "what",
    ["negative offset", "huge length", "bool offset", "other dimensions", "chunk of another size",
     "no chunk", "tuple size", "no dtype", "key", "item", "index", "info", "dunder", "version",
     "transforms"],
)  # fmt: skip
def test_malformed_metadata(what):
    metadata = sample()
    edit(metadata, what)
    with pytest.raises(FormatError):
        read_metadata(pickle.dumps(metadata))


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize("protocol", [2, 4])
def test_no_code_runs(protocol, tmp_path):
    target = tmp_path / "made"
    for evil, named in (
        (Evil(os.mkdir, str(target)), "mkdir"),
        (Evil(os.system, f"touch {target}"), "system"),
        (Evil(eval, f"open({str(target)!r}, 'w')"), "builtins.eval"),
        (Evil(getattr, Path, "home"), "builtins.getattr"),
        (Evil(torch.load, str(target)), "torch.serialization.load"),
        (Evil(io.open, str(target), "w"), "io.open"),
        (Evil(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
    ):
        metadata = sample()
        metadata.planner_data["evil"] = evil
        with pytest.raises(UnsafeCheckpointError, match=named):
            read_metadata(pickle.dumps(metadata, protocol))
    assert not target.exists()


def test_unknown_classes_are_named():
    metadata = sample()
    metadata.planner_data = [Evil]
    with pytest.raises(UnsafeCheckpointError, match=r"test_metadata_pickle\.Evil"):
        read_metadata(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x04})" + b"\x85" * 100_000 + b"Ns.",
        b"\x80\x04})" + b"2\x86" * 100 + b"Ns.",
        b"\x80\x02ctorch\nSize\n(J\xff\xff\xff\xfft\x85R.",
        b"\x80\x02ctorch\nSize\n(\x88t\x85R.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(K\x01t\x81.",
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN\x85b.",
    ],
)
def test_hostile_pickles(data):
    with pytest.raises(CheckpointError):
        read_metadata(data)


def test_unbuilt_objects_are_refused():
    for cls in (TensorStorageMetadata, TensorProperties, ChunkStorageMetadata, StorageMeta):
        bare = cls.__new__(cls)
        if cls is TensorProperties:  # it cannot pickle itself unbuilt
            bare = b"\x80\x02ctorch.distributed.checkpoint.metadata\nTensorProperties\n)\x81."
            with pytest.raises(FormatError):
                read_metadata(bare)
            continue
        metadata = sample()
        if cls is StorageMeta:
            metadata.storage_meta = bare
        elif cls is TensorStorageMetadata:
            metadata.state_dict_metadata["a"] = bare
        else:
            next(iter(metadata.state_dict_metadata.values())).chunks[0] = bare
        with pytest.raises(FormatError):
            read_metadata(pickle.dumps(metadata))


def test_what_cannot_be_written():
    with pytest.raises(UnsupportedLeafError, match="lambda"):
        write_metadata(Metadata({}, planner_data=lambda: None))


def test_many_chunks_are_read_in_time():
    expected = sample(tensors=2500, chunks=8)
    data = write_metadata(expected)
    start = time.perf_counter()
    found = read_metadata(data)
    assert time.perf_counter() - start < 5  # 0.6 s on an idle core
    assert found == expected


def test_a_changed_byte_gives_metadata_or_a_named_error():
    rng = random.Random(9)
    for protocol in (2, 4):
        item = pickle.dumps(sample(), protocol)
        for _ in range(1500):
            changed = bytearray(item)
            for _ in range(rng.choice((1, 1, 2, 8))):
                changed[rng.randrange(len(item))] = rng.randrange(256)
            try:
                found = read_metadata(bytes(changed))
            except CheckpointError:
                continue
            assert type(found) is Metadata
            repr(found), found == found
