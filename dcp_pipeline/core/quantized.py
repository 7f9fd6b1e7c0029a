"""Tensors that are stored as codes and scales, and read as the numbers that these stand for.

Two kinds are known. In blocks of float8 (``*.weight`` and ``*.weight_scale_inv`` of DeepSeek's
models) all elements of a block are multiplied by one scale. In MXFP4 (``*_blocks`` and ``*_scales``
of gpt-oss) a byte of codes holds two numbers of the Open Compute Project's format E2M1, the first
in its low bits, and 32 numbers share an exponent, a byte of the format E8M0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.table import ChunkTable, KeySpec

__all__ = [
    "CODES",
    "RESULTS",
    "SCALES",
    "Method",
    "Quantized",
    "QuantizedKeys",
    "check_quantized",
    "decode_quantized",
    "encode_quantized",
]

Method = Literal["blocks", "mxfp4"]

RESULTS: Final = ("bfloat16", "float16", "float32")
"""What can be made of codes and scales."""

CODES: Final[Mapping[str, tuple[str, ...]]] = {
    "blocks": ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    "mxfp4": ("uint8",),
}
"""Dtypes of codes, by method."""

SCALES: Final[Mapping[str, tuple[str, ...]]] = {
    "blocks": ("float32", "bfloat16", "float16", "float8_e8m0fnu"),
    "mxfp4": ("uint8",),
}
"""Dtypes of scales, by method."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """How the elements of a key come from codes and scales.

    The key's dtype and shape are those of the result. Its one row of the chunk table says where the
    codes lie, in row-major order like the scales.

    Attributes:
        method: ``blocks`` or ``mxfp4``.
        codes: dtype of the codes.
        scales: dtype of the scales.
        block: how many codes share a scale, per dimension.
        file, offset: where the scales lie: number of the file, bytes.
    """

    method: Method
    codes: str
    scales: str
    block: tuple[int, ...]
    file: int
    offset: int

    @property
    def per_code(self) -> int:
        """Elements of one code; they are neighbours in the last dimension."""
        return 2 if self.method == "mxfp4" else 1

    def codes_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the codes of a result of ``shape``."""
        return (*shape[:-1], shape[-1] // self.per_code)

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Sizes of the scales of a result of ``shape``."""
        pairs = zip(self.codes_shape(shape), self.block, strict=True)
        return tuple(-(-extent // step) for extent, step in pairs)

    def stored_bytes(self, count: int) -> int:
        """Bytes of the codes and scales of so many elements, blocks at edges not counted."""
        codes = count // self.per_code
        scales = codes // math.prod(self.block)
        return codes * ITEM_SIZES[self.codes] + scales * ITEM_SIZES[self.scales]


QuantizedKeys = Mapping[int, Quantized]
"""What is read as codes and scales, by number of the key."""


def encode_quantized(keys: QuantizedKeys) -> list[list[object]]:
    """As plain JSON data."""
    return [
        [key, one.method, one.codes, one.scales, list(one.block), one.file, one.offset]
        for key, one in keys.items()
    ]


def decode_quantized(rows: Iterable[Any]) -> dict[int, Quantized]:
    """The inverse of :func:`encode_quantized`; see :func:`check_quantized` for what it means."""
    found: dict[int, Quantized] = {}
    for key, method, codes, scales, block, file, offset in rows:
        if any(type(number) is not int for number in (key, file, offset, *block)) or key in found:
            raise FormatError(f"not a quantized key: {key!r}")
        found[key] = Quantized(method, codes, scales, tuple(block), file, offset)
    return found


def check_quantized(
    keys: QuantizedKeys, names: Sequence[str], table: ChunkTable, sizes: Sequence[int]
) -> None:
    """Raise unless codes and scales of every key lie in their files.

    Args:
        sizes: bytes of the files.

    Raises:
        FormatError: otherwise.
    """
    rows: dict[int, list[int]] = {key: [] for key in keys}
    if keys:
        for row, key in enumerate(table.key.tolist()):
            if key in rows:
                rows[key].append(row)
    for key, one in keys.items():
        if not 0 <= key < len(table.keys):
            raise FormatError("a quantized key is not there")
        problem = _problem(one, table.keys[key], table, rows[key], sizes)
        if problem:
            raise FormatError(f"{names[key]!r} cannot be made of codes and scales: {problem}")


def _problem(
    one: Quantized, spec: KeySpec, table: ChunkTable, rows: list[int], sizes: Sequence[int]
) -> str | None:
    """What is wrong with a key, in words."""
    if one.codes not in CODES.get(one.method, ()) or one.scales not in SCALES[one.method]:
        return f"{one.method!r} of {one.codes!r} and {one.scales!r} is not known"
    if spec.dtype not in RESULTS or spec.alias >= 0:
        return f"the result is {spec.dtype}"
    if len(one.block) != len(spec.shape) or not one.block or min(one.block) < 1:
        return f"blocks of {list(one.block)} of a tensor of sizes {list(spec.shape)}"
    if spec.shape[-1] % one.per_code:
        return f"{spec.shape[-1]} elements in a row, {one.per_code} in a code"
    if not 0 <= one.file < len(sizes) or one.offset < 0:
        return "the scales lie nowhere"
    end = one.offset + math.prod(one.scales_shape(spec.shape)) * ITEM_SIZES[one.scales]
    if end > sizes[one.file]:
        return f"the scales end at {end}, their file has {sizes[one.file]} bytes"
    if len(rows) != (0 not in spec.shape) or any(table.boxes(r)[1] != spec.shape for r in rows):
        return f"the codes lie in {len(rows)} parts"
    needed = math.prod(one.codes_shape(spec.shape)) * ITEM_SIZES[one.codes]
    if rows and not 0 <= table.payload[rows[0]] <= table.length[rows[0]] - needed:
        return f"{needed} bytes of codes in {table.length[rows[0]]} bytes"
    return None
