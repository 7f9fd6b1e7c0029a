"""A value may not cost what its bytes do not: refused when it is read, verified and written."""

import io
import pickle
import resource
import time
import zipfile
from collections import Counter, OrderedDict
from functools import partial
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import CheckpointError, UnsafeCheckpointError, UnsupportedLeafError
from dcp_pipeline.formats import typed_json
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.metadata_pickle import read_metadata
from dcp_pipeline.formats.torch_values import _is_plain
from dcp_pipeline.formats.torch_zip import check_readable, read_value, write_value
from dcp_pipeline.formats.value_guard import globals_of_value, pickle_of_value
from dcp_pipeline.formats.zip_directory import Window

P = 2**61 - 1
"""What Python divides integers by to hash them."""


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def item(pickled: bytes, **records: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        for name, data in records.items():
            file.writestr(f"archive/data/{name[1:]}", data)
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def number(value: int) -> bytes:
    return b"\x8a\x10" + value.to_bytes(16, "little", signed=True)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(count: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + number(
        count
    )
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage + b"tQ" + number(0) + numbers(*sizes) + numbers(*strides)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip


FOUR = {"_0": b"\0" * 4}
GIANTS = {
    "bytearray": write_value(Calls(bytearray, 4 << 30)),
    "bytes": write_value(Calls(bytes, 4 << 30)),
    "nested bytearray": write_value({"a": [1, (Calls(bytearray, 4 << 30),)]}),
    "storage": item(b"\x80\x02ctorch.storage\nUntypedStorage\n" + numbers(4 << 30) + b"R."),
    "new storage": item(b"\x80\x02ctorch.storage\nUntypedStorage\n" + numbers(4 << 30) + b"\x81."),
    "tensor": item(b"\x80\x02ctorch\nFloatTensor\n" + numbers(1 << 30) + b"R."),
    "through a subclass": item(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\n"
        b"cbuiltins\nbytearray\n" + numbers(4 << 30) + b"NtR."
    ),
    "a storage beyond its record": item(b"\x80\x02" + tensor(1 << 40, (9,), (1,)) + b".", **FOUR),
    "a tensor beyond its storage": item(b"\x80\x02" + tensor(1, (1 << 30,), (1,)) + b".", **FOUR),
    "expanded": item(b"\x80\x02" + tensor(1, (1 << 36,), (0,)) + b".", **FOUR),
    "copied": item(
        b"\x80\x02ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n("
        + tensor(1, (1 << 25,), (0,))
        + b"ctorch\nfloat64\nX\x03\0\0\0cpu\x89tR.",
        **FOUR,
    ),
    "a set of an endless tuple": item(
        b"\x80\x02c__builtin__\nset\n](N" + b"\x86q\0h\0h\0" .replace(b"\x86", b"\x85", 1)
        + b"\x86q\1h\1h\1" * 60 + b"\x86e\x85R."
    ),
}  # fmt: skip


def keys_of_one_hash(count: int) -> bytes:
    return b"".join(number(n * P) + b"N" for n in range(1, count + 1))


MANY = 30_000
SLOW = {
    "dict": b"\x80\x02}(" + keys_of_one_hash(MANY) + b"u.",
    "dict, one by one": b"\x80\x02}"
    + b"".join(number(n * P) + b"Ns" for n in range(1, MANY))
    + b".",
    "dict, in small parts": b"\x80\x02}"
    + b"".join(b"(" + number(n * P) + b"N" + number(n * P + P * MANY) + b"Nu" for n in range(MANY))
    + b".",
    "set": b"\x80\x02c__builtin__\nset\n]("
    + b"".join(number(n * P) for n in range(1, MANY))
    + b"e\x85R.",
    "tuples": b"\x80\x02}("
    + b"".join(number(n * P) + number(7) + b"\x86N" for n in range(1, MANY))
    + b"u.",
    "OrderedDict": b"\x80\x02ccollections\nOrderedDict\n]("
    + b"".join(number(n * P) + b"N\x86" for n in range(1, MANY))
    + b"e\x85R.",
    "complex": b"\x80\x02}("
    + b"".join(
        b"c__builtin__\ncomplex\nG" + pickle.dumps(float(9e15 - 1000003 * n))[12:20]
        + b"G" + pickle.dumps(float(n))[12:20] + b"\x86RN"
        for n in range(1, MANY)
    )
    + b"u.",
}  # fmt: skip


@pytest.mark.parametrize("name", GIANTS)
def test_a_small_item_cannot_ask_for_much_memory(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        read_value(GIANTS[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize("name", [*list(GIANTS)[:6], "expanded", "copied"])
def test_it_is_called_unsafe(name: str) -> None:
    with pytest.raises(UnsafeCheckpointError):
        read_value(GIANTS[name])


@pytest.mark.parametrize("name", SLOW)
def test_keys_of_one_hash_are_refused_in_time(name: str) -> None:
    started = time.process_time()
    with pytest.raises(UnsafeCheckpointError, match="hash in common"):
        read_value(item(SLOW[name]))
    assert time.process_time() - started < 60
    if name != "complex":
        with pytest.raises(UnsafeCheckpointError, match="hash in common"):
            read_metadata(SLOW[name])


@pytest.mark.parametrize("keys", [range(0, MANY * P, P), [(n * P, 0) for n in range(MANY)]])
def test_keys_of_one_hash_in_typed_json(keys: Any) -> None:
    def text(key: Any) -> Any:
        return {"$tuple": list(map(text, key))} if type(key) is tuple else {"$int": hex(key)}

    listed = [text(key) for key in keys]
    for tree in ({"$set": listed}, {"$frozenset": listed}, {"$dict": [[k, None] for k in listed]}):
        started = time.process_time()
        with pytest.raises(UnsafeCheckpointError, match="hash in common"):
            typed_json.decode(typed_json._dump(tree))
        assert time.process_time() - started < 60


@pytest.mark.parametrize("make", [set, frozenset, dict.fromkeys, OrderedDict.fromkeys])
def test_what_would_be_refused_is_refused_when_written(make: Any) -> None:
    value = make([n * P for n in range(1000)])
    with pytest.raises(UnsupportedLeafError, match="hash in common"):
        check_readable(value)
    with pytest.raises(UnsupportedLeafError, match="hash in common"):
        typed_json.encode(value)


@pytest.mark.parametrize("name", ["bytearray", "nested bytearray"])
def test_giants_are_refused_when_written(name: str) -> None:
    value: Any = Calls(bytearray, 4 << 30)
    with pytest.raises(UnsupportedLeafError, match="buffer of"):
        check_readable(value if name == "bytearray" else {"a": [value]})


@pytest.mark.parametrize(
    "value",
    [
        {1 << 200: 1}, {1 << 300: 1}, {(1,) * 400: 1}, {1: 2, (1, (2, (3,))): 4},
        {frozenset({1}): 1}, {torch.float32: 1, torch.Size([1]): 2, torch.device("cpu"): 3},
        {2**64 - n: n for n in range(1000)}, {(n, str(n)): n for n in range(1000)},
        {float(n) / 7 for n in range(3000)}, {complex(n, -n) for n in range(3000)},
    ],
)  # fmt: skip
def test_what_is_written_is_read_back(value: Any) -> None:
    try:
        data = check_readable(value)
    except UnsupportedLeafError:
        with pytest.raises(CheckpointError):
            read_value(write_value(value))
        return
    assert read_value(data) == value


def test_honest_tensors_and_buffers_are_read() -> None:
    value = {
        "expanded": torch.ones(1, 3).expand(1000, 3),
        "strided": torch.arange(24.0).view(4, 6).t(),
        "offset": torch.arange(10)[3:],
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "float8": torch.ones(3).to(torch.float8_e5m2),
        "meta": torch.empty(1 << 40, device="meta"),
        "array": bytearray(b"x" * 1000),
        "counter": Counter(a=1),
    }
    found: Any = read_value(write_value(value))
    for name in ("expanded", "strided", "offset", "empty", "parameter"):
        assert torch.equal(found[name], value[name]), name
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert found["array"] == value["array"] and found["meta"].shape == (1 << 40,)


def test_many_honest_keys_cost_little() -> None:
    keys = {(n, n * n): n for n in range(200_000)}
    data = pickle.dumps(keys, 2)
    started = time.process_time()
    assert load_inert(data, lambda module, name: None) == keys
    assert time.process_time() - started < 5
    assert not _is_plain(keys)


def test_what_torch_refuses_at_the_end_of_a_zip_is_refused() -> None:
    """For every flip in the last records: a load would fail, so verifying has to say so."""
    good = write_value({"lr": 0.1})
    for at in range(len(good) - 98, len(good)):
        for bit in range(8):
            data = bytearray(good)
            data[at] ^= 1 << bit
            try:
                torch.load(io.BytesIO(bytes(data)))
            except Exception:
                read = partial(
                    lambda all_of_it, begin, n: all_of_it[begin : begin + n], bytes(data)
                )
                window = Window(read, len(data))
                with pytest.raises(CheckpointError):
                    globals_of_value(pickle_of_value(window))
