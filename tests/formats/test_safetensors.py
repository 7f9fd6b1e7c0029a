"""The official library opens what we write; we parse what it writes and refuse what it refuses."""

import json
import random
import time

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings, strategies as st

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.formats.safetensors import (
    TensorEntry,
    encode_header,
    parse_header,
    storage_dtype,
    storage_shape,
    torch_dtype_and_shape,
)

CODED = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
).split()
SHAPES = [(3,), (2, 0, 4), (2, 3, 4), (0,)]


def parse(data: bytes):
    return parse_header(lambda at, n: data[at : at + n], len(data))


def file_of(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return len(raw).to_bytes(8, "little") + raw + data


def one(**fields: object) -> str:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields
    return json.dumps({"a": entry})


@pytest.mark.parametrize("name", CODED)
def test_the_official_library_opens_what_we_write(name, tmp_path):
    dtype = getattr(torch, name)
    shapes = SHAPES + ([()] if dtype.itemsize > 1 or name == "bool" else [])
    rng = random.Random(name)
    entries, payloads = [], []
    for at, shape in enumerate(shapes):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        payload = rng.randbytes(nbytes) if name != "bool" else bytes(nbytes)
        entries.append(TensorEntry(f"ключ {at}", name, shape, nbytes))
        payloads.append(payload)
    start, offsets = encode_header(entries, {"format": "pt", "é": '"\\'})
    assert len(start) % 8 == 0 and offsets[0] == len(start)
    data = start + b"".join(payloads)
    (tmp_path / "f").write_bytes(data)
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == {"format": "pt", "é": '"\\'}
        for entry, payload in zip(entries, payloads, strict=True):
            tensor = file.get_tensor(entry.name)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, entry.shape)
            assert bytes(tensor.flatten().view(torch.uint8).tolist()) == payload
    header = parse(data)
    assert header.metadata == {"format": "pt", "é": '"\\'}
    by_name = {entry.name: entry for entry in header.entries}
    for entry, payload, offset in zip(entries, payloads, offsets, strict=True):
        stored = by_name[entry.name]
        assert stored.begin == offset and data[stored.begin : stored.end] == payload
        assert torch_dtype_and_shape(stored.code, stored.shape) == (name, entry.shape)


@pytest.mark.parametrize("name", CODED)
def test_we_parse_what_the_official_library_writes(name):
    dtype = getattr(torch, name)
    tensors = {
        f"t{at}": torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
        for at, shape in enumerate([(3,), (2, 3, 4)])
    }
    data = safetensors.torch.save(tensors, metadata={"k": "v"})
    header = parse(data)
    assert header.metadata == {"k": "v"} and header.entries[-1].end == len(data)
    for entry in header.entries:
        found = torch_dtype_and_shape(entry.code, entry.shape)
        assert found == (name, tuple(tensors[entry.name].shape))


def test_load_file(tmp_path):
    start, _ = encode_header([TensorEntry("a", "int16", (2,), 4)], {})
    (tmp_path / "f").write_bytes(start + b"\1\0\2\0")
    assert safetensors.torch.load_file(tmp_path / "f")["a"].tolist() == [1, 2]


def test_dtypes_without_a_code():
    assert storage_dtype("complex32") == ("F16", (2,))
    assert storage_shape("complex128", (3,)) == (3, 2)
    assert storage_shape("float4_e2m1fn_x2", (3, 4)) == (3, 8)
    assert storage_shape("float4_e2m1fn_x2", ()) == (2,)
    start, _ = encode_header([TensorEntry("a", "complex128", (3,), 48)], {})
    (entry,) = parse(start + bytes(48)).entries
    assert (entry.code, entry.shape) == ("F64", (3, 2))
    with pytest.raises(UnsupportedLeafError, match="qint8"):
        storage_dtype("qint8")
    with pytest.raises(FormatError, match="F6_E2M3"):
        torch_dtype_and_shape("F6_E2M3", (4,))
    with pytest.raises(FormatError, match="F4"):
        torch_dtype_and_shape("F4", (4, 3))


@pytest.mark.parametrize(
    ("entries", "metadata"),
    [
        ([TensorEntry("a", "int8", (1,), 1)] * 2, {}),
        ([TensorEntry("__metadata__", "int8", (1,), 1)], {}),
        ([TensorEntry("\ud800", "int8", (1,), 1)], {}),
        ([TensorEntry("a", "int8", (1,), 2)], {}),
        ([TensorEntry("a", "int8", (-1, -1), 1)], {}),
        ([], {"a": "\ud800"}),
    ],
)
def test_what_cannot_be_written(entries, metadata):
    with pytest.raises(UnsupportedLeafError):
        encode_header(entries, metadata)


ACCEPTED = [
    file_of("{}"),
    file_of(" {}\n\t "),
    file_of(one(), b"1234"),
    file_of(one(shape=[]), b"1234"),
    file_of(one(shape=[0, 5], data_offsets=[0, 0])),
    file_of('{"__metadata__":null}'),
    file_of('{ "__metadata__" : { "a" : "\\u00e9\\n" } }'),
    file_of(one(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3]), b"123"),
    file_of('{"b":{"data_offsets":[2,3],"dtype":"I8","shape":[1]},'
            '"a":{"dtype":"I8","shape":[ 2 ],"data_offsets":[ 0 , 2 ]}}', b"123"),
]  # fmt: skip
REFUSED = [
    (b"", "too few"),
    (b"\0" * 8, "opening brace"),
    (file_of("[]"), "opening brace"),
    (file_of("{}", b"x"), "end at"),
    (file_of("{}x"), "goes on"),
    (file_of("{},"), "goes on"),
    (file_of(one(), b"12345"), "end at"),
    (file_of(one(), b"123"), "end at"),
    (file_of(one(shape=[2]), b"1234"), "expected 8 bytes"),
    (file_of(one(data_offsets=[4, 0]), b"1234"), "expected 4 bytes"),
    (file_of(one(data_offsets=[0, 4, 4]), b"1234"), "expected 4 bytes"),
    (file_of(one(data_offsets=[4, 8]), b"1" * 8), "hole"),
    (file_of(one(shape=[-1])), "expected a count"),
    (file_of(one(shape=[1.0])), "without the shape"),
    (file_of(one(shape=[True])), "without the shape"),
    (file_of(one(shape="1")), "without the shape"),
    (file_of(one(shape=[[1]])), "without the shape"),
    (file_of(one().replace("[1]", "[01]")), "expected a count"),
    (file_of(one().replace("[1]", "[1,]")), "expected a count"),
    (file_of(one(dtype="F99"), b"1234"), "F99"),
    (file_of(one(dtype="F4", shape=[3], data_offsets=[0, 1]), b"1"), "1.5 bytes"),
    (file_of(one(dtype=1), b"1234"), "without the dtype"),
    (file_of('{"a":{"dtype":"F32","shape":[1]}}'), "lacks"),
    (file_of(one()[:-1] + "," + one()[1:], b"1234"), "twice"),
    (file_of('{"a":{"dtype":"I8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'), "twice"),
    (file_of('{"__metadata__":{"a":"b","a":"b"}}'), "twice"),
    (file_of('{"__metadata__":{"a":1}}'), "without a string"),
    (file_of('{"__metadata__":{"a":"\\ud800"}}'), "malformed text"),
    (file_of('{"__metadata__":{"a":"\\u00"}}'), "malformed text"),
    (file_of(b'{"__metadata__":{"a":"\xff"}}'), "malformed text"),
    (file_of('{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},'
             '"b":{"dtype":"I8","shape":[4],"data_offsets":[2,6]}}', b"123456"), "overlap"),
    ((1 << 20).to_bytes(8, "little") + b"{}", "1048576 bytes in a file of 10"),
]  # fmt: skip


@pytest.mark.parametrize("data", ACCEPTED)
def test_accepted_with_the_official_library(data):
    safetensors.deserialize(data)
    parse(data)


@pytest.mark.parametrize(("data", "said"), REFUSED)
def test_refused(data, said):
    with pytest.raises(FormatError, match=said):
        parse(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff" * 8 + b"{}", "claims 18446744073709551615"),
        (file_of(one(shape=[1 << 40, 1 << 40])), "absurdly many"),
        (file_of(one(shape=[10**25])), "holds 1000"),
        (file_of(one(shape=[1] * 5000), b"1234"), "more than 1024"),
    ],
)
def test_absurd_sizes(data, said):
    with pytest.raises(UnsafeCheckpointError, match=said):
        parse(data)


def test_hostile_headers_are_refused_quickly():
    start = time.perf_counter()
    for body in (b"[" * 20_000_000, b'{"a":' * 4_000_000, b"{" + b" " * 20_000_000):
        with pytest.raises(CheckpointError):
            parse(file_of(body))
    assert time.perf_counter() - start < 5


def test_many_tensors():
    entries = [TensorEntry(f"layer.{n}.weight", "float32", (n,), 4 * n) for n in range(20_000)]
    start, offsets = encode_header(entries, {})
    size = len(start) + sum(entry.nbytes for entry in entries)
    header = parse_header(lambda at, n: start[at : at + n], size)
    assert [entry.begin for entry in header.entries] == offsets
    assert [entry.name for entry in header.entries] == [entry.name for entry in entries]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.dictionaries(texts.filter(lambda name: name != "__metadata__"),
                    st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5),
    st.dictionaries(texts, texts, max_size=3),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_round_trip(shapes, metadata):
    entries = [
        TensorEntry(name, "int16", shape, 2 * torch.Size(shape).numel())
        for name, shape in shapes.items()
    ]
    start, offsets = encode_header(entries, metadata)
    data = start + bytes(sum(entry.nbytes for entry in entries))
    header = parse(data)
    assert header.metadata == metadata
    found = {entry.name: (entry.shape, entry.begin) for entry in header.entries}
    assert found == {e.name: (e.shape, at) for e, at in zip(entries, offsets, strict=True)}
    assert {name for name, _ in safetensors.deserialize(data)} == set(shapes)


def test_a_changed_byte_is_read_as_the_official_library_does_or_refused():
    rng = random.Random(5)
    entries = [TensorEntry("a", "int16", (2, 3), 12), TensorEntry("b", "uint8", (4,), 4)]
    item = encode_header(entries, {"k": "v"})[0] + bytes(16)
    for _ in range(3000):
        changed = bytearray(item)
        for _ in range(rng.choice((1, 1, 2, 4))):
            changed[rng.randrange(len(item))] = rng.choice((rng.randrange(256), 0x30, 0x2C, 0x22))
        try:
            header = parse(bytes(changed))
        except CheckpointError:
            continue
        official = {
            name: (spec["dtype"], tuple(spec["shape"]))
            for name, spec in safetensors.deserialize(bytes(changed))
        }
        assert {e.name: (e.code, e.shape) for e in header.entries} == official
