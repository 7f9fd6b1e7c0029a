"""What the golden checkpoints hold, by formulas; needs ``torch`` and NumPy of any version alone.

Never change what a function gives for a checkpoint that is committed: add another function.
"""

from __future__ import annotations

import io
import math
from typing import Any
from zlib import crc32

import numpy as np
import torch

__all__ = ["DTYPES", "TRAINING", "of_ours", "of_ranks", "of_training", "value_of"]

DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16"
    " complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
    " float8_e8m0fnu float4_e2m1fn_x2"
).split()

SHARDED: dict[str, tuple[str, tuple[int, ...], str]] = {
    "rows": ("float32", (5, 3), "S0"),
    "columns": ("bfloat16", (3, 4), "S1"),
    "single": ("int64", (1,), "S0"),
    "strided": ("int16", (7, 2), "S0/2"),
    "replicated": ("float64", (4,), "R"),
    "empty": ("float32", (0, 3), "S0"),
}
"""Name to dtype, shape and placement on a mesh of all ranks."""

TRAINING: dict[str, tuple[int, ...]] = {"weight": (5, 2)}
"""The parameters of the model that plain DCP has saved, under FSDP2, with AdamW."""


def value_of(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Bytes that follow from the name; NaN and denormal numbers among them."""
    kind: torch.dtype = getattr(torch, dtype)
    count = math.prod(shape) * kind.itemsize
    raw = ((torch.arange(count, dtype=torch.int64) * 131 + crc32(name.encode())) >> 2) & 0xFF
    if dtype == "bool":
        return (raw & 1).bool().reshape(shape)
    return raw.to(torch.uint8).view(kind).reshape(shape)


def of_ours(sharded: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that our package has saved on two ranks, in format version 1.0.

    Args:
        sharded: the entries of :data:`SHARDED` as this rank holds them; ``None`` for whole ones.
    """
    tied = value_of("tied", (2, 3), "float32")
    return {
        "dtypes": {name: value_of(name, (2, 3), name) for name in DTYPES},
        "sharded": sharded or {n: value_of(n, s, d) for n, (d, s, _) in SHARDED.items()},
        "tied": {"first": tied, "second": tied, "list": [tied]},
        "scalar": value_of("scalar", (), "float32"),
        "transposed": value_of("transposed", (3, 4), "int32").t(),
        "split": value_of("split", (1100,), "int32"),
        "none": {"tensor": torch.zeros(0, 3), "dict": {}, "list": [], "tuple": ()},
        "numpy": {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float64(0.1)},
        "stream": io.BytesIO(b"\x00stream\xff"),
        "values": {
            "int": 1 << 70,
            "float": -0.0,
            "text": "caf\u00e9",
            "bool": True,
            "nothing": None,
            "bytes": b"\x00\xff",
            "list": [1, [2.5, "x"], (3, None)],
            "keys": {1: "int", "1": "text", 2.5: "float"},
            "a.b": {"c": 1},
            "a": {"b.c": 2},
        },
    }


def of_ranks(saved_on: int = 2) -> dict[str, Any]:
    """What each of the ranks has saved under a key of its own."""
    return {f"rank{rank}": value_of(f"rank{rank}", (3,), "float32") for rank in range(saved_on)}


def of_training() -> dict[str, Any]:
    """The tensors that plain DCP has saved, by flat name."""
    state = {}
    for name, shape in TRAINING.items():
        state[f"model.{name}"] = value_of(f"model.{name}", shape, "float32")
        for moment in ("exp_avg", "exp_avg_sq"):
            key = f"optimizer.state.{name}.{moment}"
            state[key] = value_of(key, shape, "float32")
        state[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
    return state
