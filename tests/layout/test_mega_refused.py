"""Repositories of MEGA files that are refused, or read with care."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import dcp_pipeline
from dcp_pipeline import CheckpointException
from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    NewerFormatError,
    UnsafeCheckpointError,
)
from tests.layout.test_mega import MEGA, load, manifest_of, put
from tests.mega_files import FLOATS, entry, mega

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# What is refused


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        manifest_of(tmp_path)
    put(tmp_path, "notes.txt", b"")
    with pytest.raises(CheckpointNotFoundError, match="no MEGA file"):
        manifest_of(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.mega", mega())
    put(tmp_path, "b.mega", mega())
    with pytest.raises(CorruptCheckpointError, match=r"a\.mega, b\.mega"):
        manifest_of(tmp_path)


INDICES: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "no JSON": (b"{", FormatError, "not JSON"),
    "no object": (b"[]", FormatError, "list"),
    "nested": (b'{"a":' + b"[" * 100_000, FormatError, ""),
    "no tables": ({}, FormatError, "neither"),
    "table of numbers": ({"weight_map": {"a": 1}}, FormatError, "no table of names"),
    "twice": (b'{"weight_map":{"a":"one.mega","a":"one.mega"}}', FormatError, "twice"),
    "missing file": ({"weight_map": {"a": "none.mega"}}, MissingFileError, "none.mega"),
    "missing key": (
        {"weight_map": {"a": "one.mega", "c": "one.mega"}},
        FormatError,
        "'c' is not in one.mega",
    ),
    "unknown key": ({"weight_map": {"a": "one.mega"}, "shards": {"one.mega": "one.mega",
                     "two.mega": "two.mega"}}, FormatError, "'b' lies in two.mega"),
    "elsewhere": (
        {"weight_map": {"a": "two.mega", "b": "one.mega"}},
        FormatError,
        "the index places it in",
    ),
    "not among the shards": (
        {"weight_map": {"a": "one.mega"}, "shards": {"two.mega": "two.mega"}},
        FormatError,
        "not among its shards",
    ),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, UnsafeCheckpointError, ""),
    "above": ({"weight_map": {"a": "../one.mega"}}, UnsafeCheckpointError, ""),
    "shard above": ({"shards": {"one.mega": "x/../../one.mega"}}, UnsafeCheckpointError, ""),
    "shard elsewhere": ({"shards": {"one.mega": "/etc/passwd"}}, UnsafeCheckpointError, ""),
    "shard of Windows": ({"shards": {"one.mega": "C:\\a\\b"}}, UnsafeCheckpointError, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", INDICES)
def test_hostile_indices_are_refused_by_name(tmp_path: Path, case: str) -> None:
    index, kind, text = INDICES[case]
    put(tmp_path, "one.mega", mega([entry("a")], FLOATS))
    put(tmp_path, "two.mega", mega([entry("b")], FLOATS))
    data = index if isinstance(index, bytes) else json.dumps(index).encode()
    put(tmp_path, "model.mega.index.json", data)
    with pytest.raises(kind) as caught:
        manifest_of(tmp_path)
    assert text in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        put(tmp_path, f"m-0000{number}-of-00002.mega", mega([entry("a")], FLOATS))
    with pytest.raises(FormatError, match="'a' lies in two files"):
        manifest_of(tmp_path)


BOXES = "dcp_pipeline.boxes"


@pytest.mark.parametrize(
    "box",
    [
        '{"a":1}', '{"a":["w",[0],[2,3]]}', '{"a":["w",[0,-1],[4,3]]}', '{"a":["w",[0,0],[4,3]]}',
        '{"a":["w",[1,1],[2,3]]}', '{"a":[1,[0,0],[2,3]]}', '{"a":["w",0,0]}', "[]", "{", '"x"',
        '{"a":["w",[0,0],[4611686018427387904,3]]}', '{"a":["w",[0,0],[true,3]]}',
    ],
)  # fmt: skip
def test_hostile_boxes_are_refused(tmp_path: Path, box: str) -> None:
    put(tmp_path, "model.mega", mega([entry("a")], FLOATS, {BOXES: box}))
    with pytest.raises(CheckpointError):
        manifest_of(tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        "{}", "[]", "{", '{"keys":1,"empty":[]}',
        '{"keys":[{"name":"a","path":["a"],"dtype":"float64","shape":[2,3]}],"empty":[]}',
        '{"keys":[{"name":"b","path":["a"],"dtype":"float32","shape":[2,3]}],"empty":[]}',
        '{"keys":[{"name":"a","path":[],"dtype":"float32","shape":[2,3]}],"empty":[]}',
        '{"keys":[{"name":"a","path":["a"],"dtype":"float32","shape":[2,3],"alias":0}],"empty":[]}',
        '{"keys":[{"name":"a","path":["a"],"dtype":"float32","shape":[2,3]}],"empty":[[["b"],"x"]]}',
    ],
)  # fmt: skip
def test_hostile_states_are_refused(tmp_path: Path, state: str) -> None:
    put(tmp_path, "model.mega", mega([entry("a")], FLOATS, {"dcp_pipeline.state": state}))
    with pytest.raises(CheckpointError):
        manifest_of(tmp_path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    stored = zstandard.compress(bytes(1 << 20))
    shape = (1 << 18,)
    put(tmp_path, "model.mega", mega([entry("a", (6,), flags=1, codec=1, stored=len(stored))],
                                     stored))  # fmt: skip
    with pytest.raises(CheckpointException, match=r"model\.mega, a unpacks to 1048576 bytes"):
        load(tmp_path, {"a": torch.zeros(6)})
    put(tmp_path, "model.mega", mega([entry("a", shape, flags=1, codec=1, stored=len(stored))],
                                     stored))  # fmt: skip
    load(tmp_path, {"a": torch.ones(shape)})


def test_shards_of_a_save_that_was_killed_before_its_index_are_no_checkpoint(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        data = mega([entry(f"t{number}")], FLOATS, {"dcp_pipeline.format": 1})
        put(tmp_path, f"model-0000{number}-of-00002.mega", data)
    with pytest.raises(IncompleteCheckpointError, match=r"not model\.mega\.index\.json"):
        manifest_of(tmp_path)


def test_a_newer_format_of_this_package_is_refused(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", mega([entry("a")], FLOATS, {"dcp_pipeline.format": 2}))
    with pytest.raises(NewerFormatError, match=r"model\.mega is of format 2"):
        manifest_of(tmp_path)


def test_links_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "cache", "blob", mega([entry("a")], FLOATS))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.mega").symlink_to(tmp_path / "cache" / "blob")
    assert set(dcp_pipeline.load_keys(tmp_path / "model", config=MEGA)) == {"a"}


def test_a_wrong_magic_names_the_file(tmp_path: Path) -> None:
    put(tmp_path, "model.mega", b"x" * 100)
    with pytest.raises(FormatError, match=r"model\.mega: no MEGA file"):
        manifest_of(tmp_path)
    put(tmp_path, "model.mega", struct.pack("<4sIQQ", b"MEGA", 1, 1 << 63, 0))
    with pytest.raises(FormatError, match=r"model\.mega: the header"):
        manifest_of(tmp_path)
