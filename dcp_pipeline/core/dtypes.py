"""The dtypes a checkpoint holds, by torch's own names, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ITEM_SIZES"]

ITEM_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "bfloat16": 2,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
    }
)
"""Bytes of one element, by dtype name (``float4_e2m1fn_x2`` packs two numbers into its byte)."""
