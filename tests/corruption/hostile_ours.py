"""Attacks on checkpoints of ours, by name: on the manifest, the digests and the data files."""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from dcp_pipeline.core.sums import encode_sums, parse_sums
from tests.corruption.forge import (
    Attack,
    data_file,
    edit,
    edit_columns,
    instead,
    linked,
    resum,
    runs_code,
)

__all__ = ["OURS", "SAFETENSORS"]

OURS: dict[str, Attack] = {}
SAFETENSORS: dict[str, Attack] = {}


def ours(function: Attack) -> Attack:
    OURS[function.__name__] = function
    return function


def _named(name: str) -> Attack:
    def attack(path: Path) -> None:
        edit(path, lambda members: members["files"][0].__setitem__(0, name))

    return attack


for _label, _name in {
    "absolute": "/etc/passwd", "parent": "../outside/secret", "dots": "..", "folder": "a/b",
    "backslash": "..\\secret", "nul": "a\0b", "long": "x" * 300, "empty": "",
    "record": "manifest.json", "unknown": "weights.distcp",
}.items():  # fmt: skip
    OURS[f"file_named_{_label}"] = _named(_name)


@ours
def sums_named_outside(path: Path) -> None:
    edit(path, lambda members: members["sums"][0].__setitem__(0, "../outside/secret"))


OURS["data_is_a_link_outside"] = linked("*.distcp")
OURS["sums_is_a_link_outside"] = linked("*.sums")
OURS["manifest_is_a_link_outside"] = linked("manifest.json")


for _pattern in ("*.distcp", "*.sums", "manifest.json"):
    OURS[f"{_pattern}_is_a_pipe"] = instead(_pattern, os.mkfifo)
    OURS[f"{_pattern}_is_a_folder"] = instead(_pattern, os.mkdir)
    OURS[f"{_pattern}_is_a_device"] = instead(_pattern, lambda file: os.symlink("/dev/zero", file))
    OURS[f"{_pattern}_is_a_link_to_itself"] = instead(_pattern, lambda f: os.symlink(f.name, f))


def _column(name: str, value: int, row: int = 0) -> Attack:
    def attack(path: Path) -> None:
        def change(found: dict[str, Any]) -> None:
            column = found[name].copy()
            column[row] = value
            found[name] = column

        edit_columns(path, change)

    return attack


for _column_name in ("offset", "length", "payload", "file", "key", "offsets", "sizes"):
    for _value in (-1, -(1 << 62), 1 << 40, (1 << 62) - 1, (1 << 63) - 1):
        OURS[f"{_column_name}_is_{_value}"] = _column(_column_name, _value)
OURS["owner_is_huge"] = _column("owner", 1 << 60)


def _shape(*shape: int, name: str = "v") -> Attack:
    def attack(path: Path) -> None:
        def change(members: dict[str, Any]) -> None:
            key = next(key for key in members["keys"] if key["name"] == name)
            key["shape"] = list(shape)

        edit(path, change)

    return attack


OURS["shape_overflows"] = _shape(1 << 32, 1 << 32)
OURS["shape_overflows_to_little"] = _shape(1 << 61, 8, 3)
OURS["shape_of_nothing_overflows"] = _shape(1 << 61, 1 << 61, 0)
OURS["shape_is_greater"] = _shape(9, 3)
OURS["shape_is_huge"] = _shape(1 << 40, 3)
OURS["shape_has_more_dimensions"] = _shape(8, 3, 2)
OURS["shape_is_smaller"] = _shape(7, 3)
OURS["shape_is_negative"] = _shape(-8, 3)
OURS["shape_has_a_thousand_dimensions"] = _shape(*[1] * 1000)


def _rows(change: Callable[[dict[str, Any]], object]) -> Attack:
    return lambda path: edit_columns(path, change)


def _split(found: dict[str, Any], key: int, boxes: list[tuple[int, int]]) -> None:
    """Replace the chunk of a key by several along the first dimension, over the same bytes."""
    (row,) = [row for row, owner in enumerate(found["key"]) if owner == key]
    for name, column in found.items():
        found[name] = column = list(map(list if column.ndim == 2 else int, column))
        pieces = [column[row][:] if isinstance(column[row], list) else column[row] for _ in boxes]
        for piece, (begin, extent) in enumerate(boxes):
            if name == "offsets":
                pieces[piece][0] = begin
            if name == "sizes":
                pieces[piece][0] = extent
        column[row : row + 1] = pieces


OURS["chunks_overlap"] = _rows(lambda found: _split(found, 2, [(0, 5), (3, 5)]))
OURS["chunks_leave_a_gap"] = _rows(lambda found: _split(found, 2, [(0, 3), (5, 3)]))
OURS["chunks_overlap_and_leave_a_gap"] = _rows(lambda found: _split(found, 2, [(0, 4), (0, 4)]))
OURS["chunks_are_twice_the_same"] = _rows(lambda found: _split(found, 2, [(0, 8), (0, 8)]))


@ours
def chunk_of_nobody(path: Path) -> None:
    edit_columns(path, lambda found: found.update({n: c[:-1] for n, c in found.items()}))


def _alias(name: str, alias: Any) -> Attack:
    def attack(path: Path) -> None:
        def change(members: dict[str, Any]) -> None:
            key = next(key for key in members["keys"] if key["name"] == name)
            key["alias"] = alias

        edit(path, change)

    return attack


OURS["alias_of_an_alias"] = _alias("v", 1)
OURS["alias_of_itself"] = _alias("tied", 1)
OURS["alias_in_a_circle"] = _alias("w", 1)
OURS["alias_of_another_shape"] = _alias("tied", 2)
OURS["alias_of_nothing"] = _alias("tied", 99)
OURS["alias_of_a_value"] = _alias("tied", 5)
OURS["alias_is_a_value"] = _alias("settings.lr", 0)
OURS["alias_is_text"] = _alias("tied", "0")


def _packed(packed: Callable[[], bytes], count: int = 1) -> Attack:
    def attack(path: Path) -> None:
        chunks = {"count": count, "packed": base64.b64encode(packed()).decode()}
        edit(path, lambda members: members.update(chunks=chunks))

    return attack


@cache
def _zeros(count: int) -> bytes:
    return zlib.compress(bytes(count), 9)


def _bomb(rows: int, copies: int, dimensions: int) -> bytes:
    """Zeros for eight columns, a thousand to a byte."""
    names = ("key", "owner", "file", "offset", "length", "payload", "offsets", "sizes")
    shapes = [[rows, dimensions] if name in ("offsets", "sizes") else [rows] for name in names]
    blobs = [_zeros(rows * (shape[1:] or [1])[0]) for shape in shapes]
    header = json.dumps(
        [[n, s, 1, len(b)] for n, s, b in zip(names, shapes, blobs, strict=True)] * copies
    ).encode()
    return b"".join([struct.pack("<I", len(header)), header, *blobs * copies])


OURS["packed_bomb_long"] = _packed(lambda: _bomb(30_000_000, 1, 1), 30_000_000)
OURS["packed_bomb_wide"] = _packed(lambda: _bomb(1_000_000, 1, 64), 1_000_000)
OURS["packed_bomb_many"] = _packed(lambda: _bomb(100_000, 300, 4), 100_000)
OURS["packed_of_claims"] = _packed(
    lambda: struct.pack("<I", 30) + b'[["key",[268435455],8,100000]]' + bytes(100)
)
OURS["packed_is_cut_off"] = _packed(lambda: b"\xff\xff\xff\xff")
OURS["packed_is_empty"] = _packed(lambda: b"")


def _text(text: bytes) -> Attack:
    return lambda path: (path / "manifest.json").write_bytes(text) and None


OURS["json_is_deep"] = _text(b'{"format":' + b"[" * 5_000_000)
OURS["json_is_deep_inside"] = lambda path: edit(
    path, lambda members: members.update(config=json.loads("[" * 900 + "]" * 900))
)
OURS["json_is_a_list"] = _text(b"[]")
OURS["json_is_empty"] = _text(b"")
OURS["json_is_zeros"] = _text(bytes(1 << 20))
OURS["json_has_a_long_number"] = _text(b'{"format":' + b"9" * 2_000_000 + b"}")


@ours
def json_has_a_member_twice(path: Path) -> None:
    text = (
        (path / "manifest.json").read_bytes().replace(b'"world_size":', b'"layout":"x",\n"layout":')
    )
    (path / "manifest.json").write_bytes(text)


def _path(name: str, path: list[Any]) -> Attack:
    def attack(path_of: Path) -> None:
        def change(members: dict[str, Any]) -> None:
            next(key for key in members["keys"] if key["name"] == name)["path"] = path

        edit(path_of, change)

    return attack


OURS["path_leads_nowhere"] = _path("v", [])
OURS["path_inside_another_value"] = _path("v", ["w", "x"])
OURS["path_around_another_value"] = _path("v", ["settings"])
OURS["path_of_a_place_in_a_mapping"] = _path("v", ["settings", [0]])
OURS["path_of_a_name_in_a_list"] = _path("v", ["list", "x"])
OURS["list_of_billions"] = _path("list.1", ["list", [10**9]])
OURS["list_with_a_negative_place"] = _path("list.1", ["list", [-1]])


@ours
def path_of_another_key(path: Path) -> None:
    edit(path, lambda members: members["keys"][2].update(path=members["keys"][0]["path"]))


OURS["path_is_deep"] = _path("v", ["x"] * 100_000)


@ours
def paths_with_one_hash(path: Path) -> None:
    def change(members: dict[str, Any]) -> None:
        for number in range(5_000):
            key = {"name": f"x{number}", "path": ["x", number * (2**61 - 1)], "dtype": "int8"}
            members["keys"].append(key | {"shape": [0]})

    edit(path, change)


def _member(name: str, value: Any) -> Attack:
    return lambda path: edit(path, lambda members: members.update({name: value}))


OURS["world_size_is_infinite"] = _member("world_size", float("inf"))
OURS["created_is_huge"] = _member("created", 10**400)
OURS["versions_is_a_list"] = _member("versions", [])
OURS["keys_of_text"] = _member("keys", ["w"])
OURS["newer_format"] = _member("version", [2, 0])
OURS["blocks_are_huge"] = _member("checksum", {"algorithm": "xxh3_64", "block_bytes": 1 << 61})
OURS["blocks_are_nothing"] = _member("checksum", {"algorithm": "xxh3_64", "block_bytes": 0})
OURS["checksum_is_unknown"] = _member("checksum", {"algorithm": "md5", "block_bytes": 65536})
OURS["checksum_is_a_list"] = _member("checksum", {"algorithm": [], "block_bytes": 65536})
OURS["serialization_is_unknown"] = _member("serialization", "tape")


@ours
def sums_of_huge_claims(path: Path) -> None:
    name = data_file(path).name
    header = json.dumps(
        {"algorithm": "xxh3_64", "block_bytes": 1, "files": [[name, 1 << 61]]}
    ).encode()
    resum(path, b"DCPSUMS1" + struct.pack("<I", len(header)) + header)


@ours
def sums_of_huge_blocks(path: Path) -> None:
    (sums,) = path.glob("*.sums")
    (old,) = parse_sums(sums.read_bytes()).values()
    resum(path, encode_sums([old], "xxh3_64", 1 << 60))


@ours
def sums_of_another_file(path: Path) -> None:
    (sums,) = path.glob("*.sums")
    resum(path, sums.read_bytes().replace(b"__0_0.", b"__0_1."))


@ours
def sums_are_deep(path: Path) -> None:
    text = b"[" * 1_000_000
    resum(path, b"DCPSUMS1" + struct.pack("<I", len(text)) + text)


for _how in ("mkdir", "system"):
    OURS[f"metadata_over_ours_runs_{_how}"] = runs_code(_how)


def _header(header: bytes, length: int | None = None) -> Attack:
    """Another safetensors header over the data, with digests that are right."""

    def attack(path: Path) -> None:
        file = data_file(path)
        data = file.read_bytes()
        old = int.from_bytes(data[:8], "little")
        said = len(header) if length is None else length
        new = said.to_bytes(8, "little") + header.ljust(old)[:old] + data[8 + old :]
        file.write_bytes(new)
        resum(path)

    return attack


SAFETENSORS["header_is_huge"] = _header(b"{}", 1 << 62)
SAFETENSORS["header_is_of_100_MB"] = _header(b"{}", 99_999_999)
SAFETENSORS["header_is_deep"] = _header(b"[" * 100_000)
SAFETENSORS["header_is_empty"] = _header(b"{}")
