"""``python -m tests.corruption.attacks FOLDER``: what is made of hostile checkpoints.

Each is made of a good one of ours or of plain DCP. For each, one JSON object is printed: what
``load``, ``load_keys`` and ``verify`` said, how long they took, and by how much the memory of the
process grew.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import resource
import shutil
import struct
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.sums import encode_sums, parse_sums
from dcp_pipeline.tools.verify import verify
from tests.corruption.forge import data_file, edit, edit_columns, edit_metadata, resum
from tests.equal import assert_same

Attack = Callable[[Path], None]
OURS: dict[str, Attack] = {}
SAFETENSORS: dict[str, Attack] = {}
PLAIN: dict[str, Attack] = {}


def state(value: float = -1.0) -> dict[str, Any]:
    tied = torch.full((6, 4), value)
    return {
        "w": tied,
        "tied": tied,
        "v": torch.full((8, 3), value),
        "list": [torch.full((2,), value), torch.full((3,), value)],
        "settings": {"lr": value},
    }


def ours(function: Attack) -> Attack:
    OURS[function.__name__] = function
    return function


def plain(function: Attack) -> Attack:
    PLAIN[function.__name__] = function
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


def _linked(pattern: str, target: str = "secret") -> Attack:
    def attack(path: Path) -> None:
        (file,) = path.glob(pattern)
        outside = path.parent / "outside"
        outside.mkdir(exist_ok=True)
        shutil.copy(file, outside / target)
        file.unlink()
        file.symlink_to(outside / target)

    return attack


OURS["data_is_a_link_outside"] = _linked("*.distcp")
OURS["sums_is_a_link_outside"] = _linked("*.sums")
OURS["manifest_is_a_link_outside"] = _linked("manifest.json")
PLAIN["data_is_a_link_outside"] = _linked("__0_0.distcp")
PLAIN["metadata_is_a_link_outside"] = _linked(".metadata")


def _instead(pattern: str, make: Callable[[Path], object]) -> Attack:
    def attack(path: Path) -> None:
        (file,) = path.glob(pattern)
        file.unlink()
        make(file)

    return attack


for _pattern in ("*.distcp", "*.sums", "manifest.json"):
    OURS[f"{_pattern}_is_a_pipe"] = _instead(_pattern, os.mkfifo)
    OURS[f"{_pattern}_is_a_folder"] = _instead(_pattern, os.mkdir)
    OURS[f"{_pattern}_is_a_device"] = _instead(_pattern, lambda file: os.symlink("/dev/zero", file))
    OURS[f"{_pattern}_is_a_link_to_itself"] = _instead(_pattern, lambda f: os.symlink(f.name, f))
PLAIN["metadata_is_a_pipe"] = _instead(".metadata", os.mkfifo)


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


def _packed(packed: bytes, count: int = 1) -> Attack:
    chunks = {"count": count, "packed": base64.b64encode(packed).decode()}
    return lambda path: edit(path, lambda members: members.update(chunks=chunks))


def _bomb(rows: int, copies: int, dimensions: int) -> bytes:
    """Zeros for eight columns, a thousand to a byte."""
    names = ("key", "owner", "file", "offset", "length", "payload", "offsets", "sizes")
    shapes = [[rows, dimensions] if name in ("offsets", "sizes") else [rows] for name in names]
    blobs = [zlib.compress(bytes(rows * (shape[1:] or [1])[0]), 9) for shape in shapes]
    header = json.dumps(
        [[n, s, 1, len(b)] for n, s, b in zip(names, shapes, blobs, strict=True)] * copies
    ).encode()
    return b"".join([struct.pack("<I", len(header)), header, *blobs * copies])


OURS["packed_bomb_long"] = _packed(_bomb(30_000_000, 1, 1), 30_000_000)
OURS["packed_bomb_wide"] = _packed(_bomb(1_000_000, 1, 64), 1_000_000)
OURS["packed_bomb_many"] = _packed(_bomb(100_000, 300, 4), 100_000)
OURS["packed_of_claims"] = _packed(
    struct.pack("<I", 30) + b'[["key",[268435455],8,100000]]' + bytes(100)
)
OURS["packed_is_cut_off"] = _packed(b"\xff\xff\xff\xff")
OURS["packed_is_empty"] = _packed(b"")


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
def a_list_of_billions(path: Path) -> None:
    def change(members: dict[str, Any]) -> None:
        key = next(key for key in members["keys"] if key["name"] == "list.1")
        key["path"] = ["list", [10**9]]

    edit(path, change)


@ours
def a_list_with_a_negative_place(path: Path) -> None:
    def change(members: dict[str, Any]) -> None:
        key = next(key for key in members["keys"] if key["name"] == "list.1")
        key["path"] = ["list", [-1]]

    edit(path, change)


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


class RunsCode:
    """What its pickle does when it is loaded."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def _hostile(path: Path, how: str) -> RunsCode:
    target = str(path.parent / "made-by-a-pickle")
    return RunsCode(os.mkdir, target) if how == "mkdir" else RunsCode(os.system, f"mkdir {target}")


for _how in ("mkdir", "system"):
    PLAIN[f"metadata_runs_{_how}"] = lambda path, how=_how: (  # type: ignore[misc]
        (path / ".metadata").write_bytes(pickle.dumps(_hostile(path, how))) and None
    )
    OURS[f"metadata_over_ours_runs_{_how}"] = lambda path, how=_how: (  # type: ignore[misc]
        (path / ".metadata").write_bytes(pickle.dumps(_hostile(path, how))) and None
    )


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
    _replace_item(path, "settings.lr", _torch_save(_hostile(path, "mkdir")))


@plain
def tensor_runs_code(path: Path) -> None:
    _replace_item(path, "v", _torch_save(_hostile(path, "system")))


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


def _said(action: Callable[[], Any]) -> str:
    try:
        result = action()
    except CheckpointError as error:
        for cause, _ in getattr(error, "failures", {}).values():
            if not isinstance(cause, CheckpointError):
                return f"UNNAMED {type(cause).__name__}: {cause}"
        return type(error).__name__
    except BaseException as error:
        return f"UNNAMED {type(error).__module__}.{type(error).__name__}: {error}"
    return str(result)


def _load(path: Path) -> str:
    template = state()
    try:
        dcp_pipeline.load(template, checkpoint_id=path)
    finally:
        if not torch.equal(template["w"], torch.full((6, 4), 1.0)):
            assert_same(template, state())
    assert_same(template, state(1.0))
    return "right"


def _load_keys(path: Path) -> str:
    assert_same(dcp_pipeline.load_keys(path), state(1.0))
    return "right"


def _verify(path: Path) -> str:
    report = verify(path, threads=1)
    return "well" if report.is_well else "; ".join(map(str, report.problems))[:500]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    good = {kind: folder / f"good-{kind}" for kind in ("torch_save", "safetensors", "plain")}
    for kind in ("torch_save", "safetensors"):
        config = {"serialization": kind}
        dcp_pipeline.save(state(1.0), checkpoint_id=good[kind], config=config)
    dcp.save(state(1.0), checkpoint_id=good["plain"], no_dist=True)
    groups = {"torch_save": OURS, "safetensors": SAFETENSORS, "plain": PLAIN}
    for kind, attacks in groups.items():
        for name, attack in {"none": lambda path: None, **attacks}.items():
            path = folder / f"{kind}-{name}".replace("*", "any")
            shutil.copytree(good[kind], path)
            attack(path)
            actions = {"load": _load, "load_keys": _load_keys, "verify": _verify}
            # Zeros, so that what is measured is what this one takes.
            Path("/proc/self/clear_refs").write_text("5")
            before, started = _peak(), time.perf_counter()
            said = {what: _said(lambda act=action: act(path)) for what, action in actions.items()}  # type: ignore[misc]  # noqa: B023
            seconds, grown = time.perf_counter() - started, _peak() - before
            made = (folder / "made-by-a-pickle").exists()
            report = {"kind": kind, "name": name, "seconds": seconds, "grown": grown, "made": made}
            print(json.dumps(report | {"said": said}), flush=True)
            shutil.rmtree(path)


def _peak() -> int:
    """Bytes of memory that the process has had at most since that was cleared."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
