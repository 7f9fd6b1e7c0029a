"""Attacks on checkpoints of plain DCP, by name: on ``.metadata``, on items and on places."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.corruption.forge import (
    Attack,
    data_file,
    edit_metadata,
    hostile,
    instead,
    linked,
    runs_code,
)

__all__ = ["PLAIN"]

PLAIN: dict[str, Attack] = {
    "data_is_a_link_outside": linked("__0_0.distcp"),
    "data_is_a_pipe": instead("__0_0.distcp", os.mkfifo),
    "data_is_a_folder": instead("__0_0.distcp", os.mkdir),
    "data_is_a_device": instead("__0_0.distcp", lambda file: os.symlink("/dev/zero", file)),
    "metadata_is_a_link_outside": linked(".metadata"),
    "metadata_is_a_pipe": instead(".metadata", os.mkfifo),
    "metadata_runs_mkdir": runs_code("mkdir"),
    "metadata_runs_system": runs_code("system"),
}


def plain(function: Attack) -> Attack:
    PLAIN[function.__name__] = function
    return function


def _replace_item(path: Path, name: str, item: bytes) -> None:
    """Put other bytes behind the data of plain DCP, and let ``.metadata`` point at them."""
    file = data_file(path)
    begin = file.stat().st_size
    with open(file, "ab") as stream:
        stream.write(item)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.offset, info.length = begin, len(item)

    edit_metadata(path, change)


def _torch_save(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _zip(compression: int, *records: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in records:
            archive.writestr(name, data)
    return buffer.getvalue()


@plain
def value_runs_code(path: Path) -> None:
    _replace_item(path, "settings.lr", _torch_save(hostile(path, "mkdir")))


@plain
def tensor_runs_code(path: Path) -> None:
    _replace_item(path, "v", _torch_save(hostile(path, "system")))


@plain
def value_is_a_bomb(path: Path) -> None:
    bomb = _zip(zipfile.ZIP_DEFLATED, ("a/data.pkl", bytes(300 << 20)), ("a/version", b"3"))
    _replace_item(path, "settings.lr", bomb)


@plain
def tensor_is_a_bomb(path: Path) -> None:
    bomb = _zip(zipfile.ZIP_DEFLATED, ("a/data.pkl", b"x"), ("a/data/0", bytes(300 << 20)))
    _replace_item(path, "v", bomb)


@plain
def value_memoizes_far_away(path: Path) -> None:
    hostile = b"\x80\x02]r\xff\xff\xff\x7f."
    _replace_item(path, "settings.lr", _zip(zipfile.ZIP_STORED, ("a/data.pkl", hostile)))


@plain
def item_names_a_record_twice(path: Path) -> None:
    good = _torch_save(torch.zeros(8, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twice = _zip(zipfile.ZIP_STORED, ("a/data.pkl", good), ("a/data.pkl", good))
    _replace_item(path, "v", twice)


@plain
def item_of_a_million_records(path: Path) -> None:
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 65535, 65535, 0xFFFFFFF0, 0, 0)
    _replace_item(path, "v", bytes(100) + end)


@plain
def item_is_of_another_shape(path: Path) -> None:
    _replace_item(path, "v", _torch_save(torch.zeros(3, 8)))


@plain
def item_reaches_out_of_itself(path: Path) -> None:
    view = torch.zeros(24).as_strided((8, 3), (3, 1))
    item = bytearray(_torch_save(view.clone()))
    at = item.index(b"K\x08K\x03\x86")
    item[at + 5 : at + 10] = b"K\xffK\xff\x86"  # its strides
    _replace_item(path, "v", bytes(item))


def _place(**fields: Any) -> Attack:
    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "v":
                vars(info).update(fields)

    return lambda path: _edit_blindly(path, change)


def _edit_blindly(path: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


for _label, _fields in {
    "absolute": {"relative_path": "/etc/passwd"},
    "parent": {"relative_path": "../outside/secret"},
    "nul": {"relative_path": "a\0b"},
    "folder": {"relative_path": "a/b"},
    "nowhere": {"relative_path": "__7_7.distcp"},
    "behind": {"offset": 1 << 40},
    "negative": {"offset": -5},
    "huge": {"length": 1 << 62},
    "infinite": {"length": 1 << 200},
}.items():
    PLAIN[f"place_{_label}"] = _place(**_fields)


def _lies(**paths: tuple[Any, ...]) -> Attack:
    """Keys that are said to lie elsewhere in the nested state."""
    names = {name.replace("_", "."): path for name, path in paths.items()}
    return lambda path: _edit_blindly(path, lambda metadata: metadata.planner_data.update(names))


PLAIN["path_before_a_list"] = _lies(list_1=("list", -1))
PLAIN["path_of_billions"] = _lies(list_1=("list", 10**9))
PLAIN["path_of_a_number"] = _lies(list_1=("list", 1.5))
PLAIN["path_of_a_tuple"] = _lies(list_1=("list", ("x",)))
PLAIN["path_of_another_key"] = _lies(settings_lr=("v",))
PLAIN["path_inside_another_value"] = _lies(settings_lr=("v", "x"))
PLAIN["path_of_a_name_in_a_list"] = _lies(settings_lr=("list", "x"))
PLAIN["path_is_deep"] = _lies(settings_lr=("x",) * 100_000)


def _pickled(pickled: Callable[[], bytes]) -> Attack:
    """A value of any pickle."""
    return lambda path: _replace_item(
        path, "settings.lr", _zip(zipfile.ZIP_STORED, ("a/data.pkl", pickled()))
    )


def _long(number: int) -> bytes:
    return b"\x8a\x10" + number.to_bytes(16, "little")


PRIME = 2**61 - 1
PLAIN["value_asks_for_a_buffer"] = _pickled(
    lambda: b"\x80\x02cbuiltins\nbytearray\n" + _long(4 << 30) + b"\x85R."
)
PLAIN["value_asks_for_a_storage"] = _pickled(
    lambda: b"\x80\x02ctorch.storage\nUntypedStorage\n" + _long(4 << 30) + b"\x85R."
)
PLAIN["value_of_keys_with_one_hash"] = _pickled(
    lambda: b"\x80\x02}(" + b"".join(_long(n * PRIME) + b"N" for n in range(60_000)) + b"u."
)
PLAIN["value_that_ends_early"] = _pickled(lambda: b"\x80\x02](NN")
PLAIN["value_that_is_no_pickle"] = _pickled(lambda: b"garbage")


@plain
def metadata_of_keys_with_one_hash(path: Path) -> None:
    keys = b"".join(_long(n * PRIME) + b"N" for n in range(60_000))
    (path / ".metadata").write_bytes(b"\x80\x04}(" + keys + b"u.")


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Attack:
    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["v"]
        tensor.chunks[0].offsets, tensor.chunks[0].sizes = torch.Size(offsets), torch.Size(sizes)
        for index in list(metadata.storage_data):
            if index.fqn == "v":
                info = metadata.storage_data.pop(index)
                moved = type(index)("v", torch.Size(offsets), 0)
                metadata.storage_data[moved] = info

    return lambda path: _edit_blindly(path, change)


PLAIN["chunk_out_of_bounds"] = _chunk((4, 0), (8, 3))
PLAIN["chunk_too_small"] = _chunk((0, 0), (7, 3))
PLAIN["chunk_huge"] = _chunk((0, 0), (1 << 40, 1 << 40))


@plain
def tensor_is_huge(path: Path) -> None:
    _resize(path, 1 << 32, 1 << 31)


@plain
def tensor_is_greater_than_its_item(path: Path) -> None:
    _resize(path, 1 << 20, 1 << 20)


@plain
def tensor_of_nothing_is_huge(path: Path) -> None:
    _resize(path, 1 << 61, 1 << 61, 0)


def _resize(path: Path, *shape: int) -> None:
    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["v"]
        tensor.size = tensor.chunks[0].sizes = torch.Size(shape)
        tensor.chunks[0].offsets = torch.Size([0] * len(shape))

    _edit_blindly(path, change)
