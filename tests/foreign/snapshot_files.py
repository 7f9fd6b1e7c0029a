"""Snapshots of torchsnapshot, written by what ``torchsnapshot/manifest.py`` documents."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.equal import bits

__all__ = ["write_snapshot"]


class _Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.batch = b""
        self.entries: dict[str, Any] = {}

    def tensor(self, name: str, tensor: torch.Tensor, **more: Any) -> dict[str, Any]:
        entry = {
            "type": "Tensor",
            "location": f"{name.replace('%', '_')}",
            "serializer": "buffer_protocol",
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "replicated": False,
            "byte_range": None,
            **more,
        }
        file = self.path / entry["location"]
        if entry["location"].startswith("batched/"):
            data = bytes(bits(tensor).tolist())
            entry["byte_range"] = [len(self.batch), len(self.batch) + len(data)]
            self.batch += data
            return entry
        file.parent.mkdir(parents=True, exist_ok=True)
        if entry["serializer"] == "torch_save":
            torch.save(tensor, file)
        else:
            file.write_bytes(bytes(bits(tensor).tolist()))
        return entry

    def object(self, name: str, value: Any, replicated: bool = False) -> dict[str, Any]:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, file)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return {
            "type": "object", "location": name, "serializer": "torch_save", "obj_type": kind,
            "replicated": replicated,
        }  # fmt: skip


def primitive(value: Any, replicated: bool = False) -> dict[str, Any]:
    text = str(value)
    if isinstance(value, float):
        text = base64.b64encode(struct.pack("d", value)).decode()
    elif isinstance(value, bytes):
        text = base64.b64encode(value).decode()
    return {
        "type": type(value).__name__, "serialized_value": text, "replicated": replicated,
        "readable": None,
    }  # fmt: skip


def write_snapshot(path: Path, is_json: bool = True) -> dict[str, Any]:
    """What two ranks have saved; what is to be read of it."""
    writer = _Writer(path)
    entries = writer.entries
    weight = torch.arange(12.0).view(4, 3)
    table = torch.arange(8).view(4, 2)
    shared = torch.ones(3, dtype=torch.bfloat16)
    batch = {"location": "batched/0123"}
    for rank in range(2):
        entries[f"{rank}/app"] = {
            "type": "dict",
            "keys": ["weight", "shared", "chunked", "step", "own", 7, "a/b%", "seen", "none", "e"],
        }
        half = slice(2 * rank, 2 * rank + 2)
        shard = {
            "offsets": [2 * rank, 0],
            "sizes": [2, 3],
            "tensor": writer.tensor(f"sharded/app/weight_{rank}", weight[half], **batch),
        }
        entries[f"{rank}/app/weight"] = {"type": "ShardedTensor", "shards": [shard]}
        entries[f"{rank}/app/own"] = writer.tensor(f"{rank}/app/own", torch.full((2,), rank))
        entries[f"{rank}/app/e"] = {"type": "dict", "keys": []}
        entries[f"{rank}/app/seen"] = {"type": "list"}
        for position, value in enumerate((3, 0.1, "x", True, b"\0\xff")):
            entries[f"{rank}/app/seen/{position}"] = primitive(value)
    chunks = [
        {"offsets": [at, 0], "sizes": [2, 2], "tensor": writer.tensor(f"c{at}", table[at : at + 2])}
        for at in (0, 2)
    ]
    entries["0/app/chunked"] = {
        "type": "ChunkedTensor", "dtype": "torch.int64", "shape": [4, 2], "chunks": chunks,
        "replicated": True,
    }  # fmt: skip
    entries["0/app/shared"] = writer.tensor("replicated/shared", shared, replicated=True, **batch)
    entries["0/app/step"] = primitive(12, replicated=True)
    entries["0/app/none"] = writer.object("replicated/none", None, replicated=True)
    turned = torch.arange(6.0).view(2, 3).t()
    entries["0/app/7"] = writer.tensor(
        "replicated/7", turned, replicated=True, serializer="torch_save"
    )
    entries["0/app/a%2Fb%25"] = writer.object("replicated/odd", {"x": {1, 2}}, replicated=True)
    (path / "batched").mkdir()
    (path / "batched" / "0123").write_bytes(writer.batch)
    metadata = {"version": "0.1.0", "world_size": 2, "manifest": entries}
    text = json.dumps(metadata, indent=2) if is_json else yaml.safe_dump(metadata)
    (path / ".snapshot_metadata").write_text(text)
    own = {
        f"rank{rank}": {
            "app": {
                "own": torch.full((2,), rank), "seen": [3, 0.1, "x", True, b"\0\xff"], "e": {},
            }
        }
        for rank in range(2)
    }  # fmt: skip
    app = {
        "weight": weight, "chunked": table, "shared": shared, "step": 12, "none": None,
        7: turned, "a/b%": {"x": {1, 2}},
    }  # fmt: skip
    return {"app": app, **own}
