"""Values that share their parts: honest ones, and those that would be endless as text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError, UnsupportedLeafError
from dcp_pipeline.formats.metadata_pickle import read_metadata
from dcp_pipeline.formats.sharing import is_endless
from dcp_pipeline.formats.typed_json import decode, encode
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.tools.diff import diff


def doubled(make: Callable[[Any], Any]) -> Any:
    value: Any = (1.5,)
    for _ in range(90):
        value = make(value)
    return value


def holds_itself() -> list[Any]:
    value: list[Any] = []
    value += [value] * 3
    return value


LARGE = 1 << 20
ENDLESS = {
    "lists": lambda: doubled(lambda x: [x, x]),
    "tuples": lambda: doubled(lambda x: (x, x)),
    "dicts": lambda: doubled(lambda x: {"a": x, "b": x}),
    "dicts of other keys": lambda: doubled(lambda x: {1: x, 2: x}),
    "OrderedDicts": lambda: doubled(lambda x: OrderedDict(a=x, b=x)),
    "long lists": lambda: doubled(lambda x: [x] * 10),
    "a list that holds itself": holds_itself,
    "one text": lambda: ["x" * LARGE] * 20_000,
    "one bytes": lambda: [bytes(LARGE)] * 20_000,
    "one bytearray": lambda: [bytearray(LARGE)] * 20_000,
    "one text, as a value": lambda: [{"a": "x" * LARGE}] * 20_000,
}
HONEST = {
    "groups": lambda: [{"lr": 0.1, "betas": (0.9, 0.99), "names": ["a"] * 10}] * 1000,
    "short text": lambda: ["x" * 60] * 30_000,
    "longer text": lambda: ["x" * 100] * 100_000,
    "no sharing": lambda: [[i, str(i)] for i in range(10_000)],
    "one large text": lambda: ["x" * LARGE, "x" * LARGE],
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_is_endless_is_not_written(name: str) -> None:
    value = ENDLESS[name]()
    assert is_endless(value)
    with pytest.raises(UnsupportedLeafError, match=r"shares its parts|contains itself"):
        encode(value)
    assert value_digest(value) == 0


@pytest.mark.parametrize("name", HONEST)
def test_what_is_not_is(name: str) -> None:
    value = HONEST[name]()
    assert not is_endless(value)
    assert decode(encode(value)) == value


def test_differences_are_told_without_writing_them_out(tmp_path: Path) -> None:
    for name, last in (("a", 1), ("b", 2)):
        dcp.save({"v": (ENDLESS["tuples"](), last)}, checkpoint_id=tmp_path / name, no_dist=True)
    (found,) = diff(tmp_path / "a", tmp_path / "b").differences
    assert (found.name, found.what) == ("v", "value")
    assert len(found.a) < 100 and found.a != found.b


SHARED = b"K\x01\x85" + b"2\x86" * 100  # (1,), and then a hundred times a pair of what is there
DCP = b"torch.distributed.checkpoint"


def _global(module: bytes, name: bytes) -> bytes:
    return b"c" + module + b"\n" + name + b"\n"


def _made(module: bytes, name: bytes, **state: bytes) -> bytes:
    items = (b"X" + len(key).to_bytes(4, "little") + key.encode() + state[key] for key in state)
    return _global(module, name) + b")\x81}(" + b"".join(items) + b"ub"


METADATA, FILE, ONE = DCP + b".metadata", (DCP + b".filesystem", b"_StorageInfo"), b"K\x01"
TEXTS = {
    "a size": _global(b"torch", b"Size") + b"(" + SHARED + b"t\x85R",
    "a layout": _global(b"torch.serialization", b"_get_layout") + SHARED + b"\x85R",
    "a memory format": _global(METADATA, b"_MEM_FORMAT_ENCODING") + SHARED + b"\x85R",
    "properties": _made(METADATA, b"TensorStorageMetadata", properties=SHARED),
    "a name": _made(METADATA, b"MetadataIndex", fqn=SHARED),
    "offsets": _made(METADATA, b"ChunkStorageMetadata", offsets=SHARED, sizes=ONE),
    "a checkpoint's id": _made(METADATA, b"StorageMeta", checkpoint_id=SHARED),
    "a file": _made(*FILE, relative_path=SHARED, offset=ONE, length=ONE),
    "an offset": _made(*FILE, relative_path=ONE, offset=SHARED, length=ONE),
    "a version": _made(METADATA, b"Metadata", state_dict_metadata=b"}", version=SHARED),
    "an attribute": _global(METADATA, b"BytesStorageMetadata") + b")\x81}(" + SHARED + ONE + b"ub",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_errors_about_metadata_do_not_write_it_out(name: str) -> None:
    with pytest.raises((FormatError, UnsafeCheckpointError)) as caught:
        read_metadata(b"\x80\x04" + TEXTS[name] + b".")
    assert len(str(caught.value)) < 500
