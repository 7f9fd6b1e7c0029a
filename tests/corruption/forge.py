"""Checkpoints that are made to mislead: every digest is right, so that only the content tells."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.packing import pack_columns, unpack_columns
from dcp_pipeline.core.sums import encode_sums, parse_sums, sums_digest
from dcp_pipeline.formats.metadata_pickle import read_metadata, write_metadata

__all__ = [
    "Attack",
    "RunsCode",
    "columns",
    "data_file",
    "edit",
    "edit_columns",
    "edit_metadata",
    "encode",
    "hostile",
    "instead",
    "linked",
    "resum",
    "runs_code",
]

Attack = Callable[[Path], None]
"""Changes a good checkpoint in a directory."""


def encode(members: dict[str, Any]) -> bytes:
    """The bytes of a manifest of any members."""
    lines = [f"{json.dumps(name)}:{json.dumps(value)}" for name, value in members.items()]
    body = ("{" + ",\n".join(lines)).encode()
    return body + b',\n"digest":"' + digest_of("xxh3_64", body).hex().encode() + b'"}\n'


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the members of the manifest in a directory."""
    members = json.loads((path / "manifest.json").read_bytes())
    del members["digest"]
    change(members)
    (path / "manifest.json").write_bytes(encode(members))


def columns(members: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The chunk columns of a manifest."""
    return dict(unpack_columns(base64.b64decode(members["chunks"]["packed"])))


def edit_columns(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the chunk columns of the manifest in a directory."""

    def change_members(members: dict[str, Any]) -> None:
        found = columns(members)
        change(found)
        packed = pack_columns(
            {name: np.asarray(column, np.int64) for name, column in found.items()}
        )
        members["chunks"] = {
            "count": len(found["key"]),
            "packed": base64.b64encode(packed).decode(),
        }

    edit(path, change_members)


def data_file(path: Path) -> Path:
    """The one data file of a directory."""
    (found,) = [*path.glob("*.distcp"), *path.glob("*.safetensors")]
    return found


def resum(path: Path, sums: bytes | None = None) -> None:
    """Digests of the data file as it is now (or any other ``sums``), and in the manifest theirs."""
    (file,), data = path.glob("*.sums"), data_file(path).read_bytes()
    if sums is None:
        (old,) = parse_sums(file.read_bytes()).values()
        digests = b"".join(
            digest_of(old.algorithm, data[at : at + old.block_bytes])
            for at in range(0, len(data), old.block_bytes)
        )
        new = type(old)(old.name, len(data), old.algorithm, old.block_bytes, digests)
        sums = encode_sums([new], old.algorithm, old.block_bytes)
    file.write_bytes(sums)

    def change(members: dict[str, Any]) -> None:
        algorithm = members["checksum"]["algorithm"]
        members["files"] = [[data_file(path).name, len(data)]]
        members["sums"] = [[file.name, len(sums), sums_digest(algorithm, sums)]]

    edit(path, change)


def edit_metadata(path: Path, change: Callable[[Any], object]) -> None:
    """Change what ``.metadata`` of plain DCP says."""
    metadata = read_metadata((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(write_metadata(metadata))


def linked(pattern: str, target: str = "secret") -> Attack:
    """A link that leads out of the directory, in place of a file."""

    def attack(path: Path) -> None:
        (file,) = path.glob(pattern)
        outside = path.parent / "outside"
        outside.mkdir(exist_ok=True)
        shutil.copy(file, outside / target)
        file.unlink()
        file.symlink_to(outside / target)

    return attack


def instead(pattern: str, make: Callable[[Path], object]) -> Attack:
    """Something else in place of a file."""

    def attack(path: Path) -> None:
        (file,) = path.glob(pattern)
        file.unlink()
        make(file)

    return attack


class RunsCode:
    """What its pickle does when it is loaded."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


def hostile(path: Path, how: str) -> RunsCode:
    """What makes a folder beside the checkpoint when it is loaded."""
    target = str(path.parent / "made-by-a-pickle")
    return RunsCode(os.mkdir, target) if how == "mkdir" else RunsCode(os.system, f"mkdir {target}")


def runs_code(how: str) -> Attack:
    """``.metadata`` whose pickle makes a folder when it is loaded."""

    def attack(path: Path) -> None:
        (path / ".metadata").write_bytes(pickle.dumps(hostile(path, how)))

    return attack
