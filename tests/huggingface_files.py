"""Repositories of Hugging Face, made with the official library and with torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["every_dtype", "index_of", "save_shards"]


def every_dtype() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that safetensors holds, a scalar, and one without elements."""
    found: dict[str, torch.Tensor] = {}
    for number, (name, dtype) in enumerate(DTYPES.items()):
        if name in ("complex32", "complex128"):
            continue
        generator = torch.Generator().manual_seed(number)
        raw = torch.randint(0, 256, (6 * 8 * dtype.itemsize,), generator=generator)
        raw = raw % 2 if dtype is torch.bool else raw
        found[f"layers.0.{name}"] = raw.to(torch.uint8).view(dtype).view(6, 8)
    found["scalar"] = torch.tensor(3, dtype=torch.int64)
    found["empty"] = torch.zeros(0, 4)
    return found


def index_of(weight_map: dict[str, str], **metadata: Any) -> str:
    """The text of an index."""
    return json.dumps({"metadata": metadata, "weight_map": weight_map})


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int) -> dict[str, str]:
    """``count`` files and their index; the weight map."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[number::count])
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    total = sum(one.numel() * one.element_size() for one in tensors.values())
    text = index_of(weight_map, total_size=total)
    (folder / "model.safetensors.index.json").write_text(text)
    return weight_map
