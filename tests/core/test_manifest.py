import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import (
    ChecksumError,
    CorruptCheckpointError,
    FormatError,
    NewerFormatError,
    UnsafeCheckpointError,
)
from dcp_pipeline.core.manifest import FileEntry, Manifest, MetadataEntry, SumsEntry, safe_name
from dcp_pipeline.core.path import Index
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind


def sample() -> Manifest:
    keys = (
        KeySpec(("model", Index(0), 1, "w"), Kind.TENSOR, "float32", (4, 2)),
        KeySpec(("tied",), Kind.TENSOR, "float32", (4, 2), alias=0),
        KeySpec(("value", None, 1.5, True), Kind.VALUE),
        KeySpec(("array",), Kind.ARRAY, "int8", ()),
    )
    table = ChunkTable.build(keys, [0, 0, 2, 3], [(0, 0), (2, 0), (), ()], [(2, 2), (2, 2), (), ()])
    table.file[:] = [0, 1, 0, 0]
    table.offset[:] = [0, 0, 64, 128]
    table.length[:] = [40, 40, 20, 21]
    table.payload[:] = [20, 20, 0, 20]
    table.owner[:] = [0, 1, 0, 0]
    return Manifest(
        save_id="0123456789abcdef" * 2,
        created=1.5e9,
        world_size=2,
        serialization="torch_save",
        layout="dcp",
        names=("model.0.1.w", "tied", "value.None.1.5.True", "array"),
        table=table,
        files=(FileEntry("a", 200), FileEntry("b", 40)),
        sums=(SumsEntry("s", 10, "00ff"),),
        checksum="sha256",
        block_bytes=65536,
        versions={"torch": "2.13"},
        config={"storage": {"kind": "filesystem"}},
        empty=((("e", Index(3, True)), "tuple"),),
        metadata=MetadataEntry(5, "aa"),
        superseded="bb",
    )


def assert_equal(found: Manifest, wanted: Manifest) -> None:
    for name in vars(wanted):
        if name != "table":
            assert getattr(found, name) == getattr(wanted, name), name
    assert found.table.keys == wanted.table.keys
    columns = wanted.table.columns("key", "owner", "file", "offset", "length", "payload")
    for name, column in columns.items():
        assert np.array_equal(getattr(found.table, name), column), name


def test_a_manifest_comes_back() -> None:
    assert_equal(Manifest.decode(sample().encode()), sample())
    bare = replace(sample(), metadata=None, superseded=None, sums=(), checksum=None, save_id="")
    assert_equal(Manifest.decode(bare.encode()), bare)
    assert bare.is_foreign and not sample().is_foreign


def test_an_empty_manifest_comes_back() -> None:
    empty = replace(sample(), names=(), table=ChunkTable.build((), [], [], []), files=(), sums=())
    assert_equal(Manifest.decode(empty.encode()), empty)


def test_it_is_json_with_one_member_a_line_and_a_digest_at_the_end() -> None:
    data = sample().encode()
    members = json.loads(data)
    assert members["format"] == "dcp_pipeline.checkpoint" and members["version"] == [1, 1]
    assert data.count(b"\n") == len(members)
    assert list(members)[-1] == "digest"


def changed(**members: Any) -> bytes:
    """A manifest with other members and a digest that fits."""
    found = {**json.loads(sample().encode()), **members}
    del found["digest"]
    lines = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in found.items()]
    body = ("{" + ",\n".join(lines)).encode()
    return body + b',\n"digest":"' + digest_of("xxh3_64", body).hex().encode() + b'"}\n'


def test_every_flipped_bit_of_any_byte_is_refused() -> None:
    whole = sample().encode()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]
        if at < len(whole) - 1:
            with pytest.raises((FormatError, ChecksumError, NewerFormatError)):
                Manifest.decode(damaged)
    for cut in range(len(whole) - 1):
        with pytest.raises(CorruptCheckpointError):
            Manifest.decode(whole[:cut])


def test_an_unknown_member_and_a_newer_minor_version_are_read() -> None:
    assert_equal(Manifest.decode(changed(version=[1, 7], news={"x": 1})), sample())


def test_a_newer_major_version_is_named_even_if_all_else_is_new() -> None:
    data = b'{"format":"dcp_pipeline.checkpoint","version":[2,1]}'
    with pytest.raises(NewerFormatError, match=r"\[2, 1\].*1\.x.*newer"):
        Manifest.decode(data)


@pytest.mark.parametrize(
    "members",
    [
        {"format": "other"},
        {"version": "1"},
        {"version": []},
        {"version": [True]},
        {"save_id": "xyz"},
        {"save_id": "0" * 31},
        {"save_id": 3},
        {"keys": []},
        {"keys": None},
        {"keys": [{"name": "a"}] * 4},
        {"files": [["a", 200]]},
        {"files": [["a", 200], ["a", 40]]},
        {"files": [["a", 10], ["b", 40]]},
        {"files": [["a", -1], ["b", 40]]},
        {"files": [["a", 200.0], ["b", 40]]},
        {"files": [["a"], ["b"]]},
        {"sums": [["s", 1]]},
        {"empty": [[["e"], "set"]]},
        {"chunks": {"count": 3, "packed": ""}},
        {"chunks": {"count": 4, "packed": "!!"}},
        {"chunks": {}},
        {"checksum": None},
        {"world_size": "many"},
        {"versions": []},
        {"config": 3},
    ],
    ids=lambda members: str(members)[:40],
)
def test_members_that_contradict_are_a_format_error(members: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(changed(**members))


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "..", "", "a\\b", "a\0", "a" * 300])
@pytest.mark.parametrize("member", ["files", "sums"])
def test_u14_file_names_that_lead_out(name: str, member: str) -> None:
    entry = {"files": [["a", 200], [name, 40]], "sums": [[name, 1, "00"]]}[member]
    with pytest.raises(UnsafeCheckpointError):
        Manifest.decode(changed(**{member: entry}))
    with pytest.raises(UnsafeCheckpointError):
        safe_name(name)


@pytest.mark.parametrize(
    ("column", "value"),
    [("file", 2), ("file", -1), ("offset", -1), ("offset", 1 << 61), ("length", -5), ("sizes", -1),
     ("offset", 190), ("payload", 30), ("length", 1 << 61), ("key", 9)],
)  # fmt: skip
def test_chunks_that_lie_nowhere(column: str, value: int) -> None:
    manifest = sample()
    getattr(manifest.table, column)[0] = value
    with pytest.raises(FormatError):
        Manifest.decode(manifest.encode())


def test_a_member_that_stands_twice_is_refused() -> None:
    body = sample().encode()[:-2]
    with pytest.raises(FormatError, match="twice"):
        Manifest.decode(body + b',\n"version":[1,0]}\n')
