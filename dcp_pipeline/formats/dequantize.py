"""The arithmetic of tensors that are stored as codes and scales, see ``core/quantized.py``.

Results are those of ``torch.distributed.checkpoint.QuantizedHuggingFaceStorageReader``, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from dcp_pipeline.core.quantized import Quantized

__all__ = ["dequantize", "scale_box"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_E2M1, *(-number for number in _E2M1))


def scale_box(
    quantized: Quantized, begin: Sequence[int], extent: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Begin and extent of the scales that a box of codes needs.

    >>> one = Quantized("blocks", "float8_e4m3fn", "float32", (128, 128), 0, 0)
    >>> scale_box(one, (100, 128), (29, 128))
    ((0, 1), (2, 1))
    """
    low = tuple(at // step for at, step in zip(begin, quantized.block, strict=True))
    high = (
        -(-(at + count) // step)
        for at, count, step in zip(begin, extent, quantized.block, strict=True)
    )
    return low, tuple(end - at for at, end in zip(low, high, strict=True))


def dequantize(
    quantized: Quantized, codes: torch.Tensor, scales: torch.Tensor, begin: Sequence[int]
) -> torch.Tensor:
    """The numbers that a box of codes stands for.

    Args:
        codes: the box.
        scales: what :func:`scale_box` says of it.
        begin: where the box starts in the tensor of all codes.

    Returns:
        float32, sizes of ``codes``; for MXFP4 the last one is doubled.

    Example:
        >>> one = Quantized("mxfp4", "uint8", "uint8", (16,), 0, 0)
        >>> codes = torch.tensor([0x21, 0xF7], dtype=torch.uint8)
        >>> dequantize(one, codes, torch.tensor([128], dtype=torch.uint8), (0,))
        tensor([  1.,   2.,  12., -12.])
    """
    if quantized.method == "mxfp4":
        factors = _spread(_looked_up(_POWERS, scales), quantized.block, begin, codes.shape)
        pairs = _looked_up(_PAIRS, codes).view(torch.float32).view(*codes.shape, 2)
        return pairs.mul_(factors.unsqueeze(-1)).flatten(-2)
    factors = _spread(scales.to(torch.float32), quantized.block, begin, codes.shape)
    return _looked_up(_numbers_of(codes.dtype), codes).mul_(factors)


def _spread(
    scales: torch.Tensor, block: Sequence[int], begin: Sequence[int], extent: Sequence[int]
) -> torch.Tensor:
    """Each scale as often as there are codes for it, or 1 in dimensions where it is the same."""
    for dimension, (step, at, count) in enumerate(zip(block, begin, extent, strict=True)):
        if step > 1 and scales.shape[dimension] > 1:
            numbers = torch.arange(at, at + count, device="cpu") // step - at // step
            scales = scales.index_select(dimension, numbers)
    return scales


def _looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """For each byte its entry in a table of 256, which is many times faster than a conversion."""
    numbers = codes.reshape(-1).view(torch.uint8).to(torch.int32)
    return table.index_select(0, numbers).view(codes.shape)


@cache
def _numbers_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32)


_POWERS = torch.tensor(
    [math.ldexp(1.0, exponent - 127) for exponent in range(256)], dtype=torch.float32, device="cpu"
)
# Two numbers in one entry.
_PAIRS = (
    torch.tensor(
        [[_NUMBERS[code & 15], _NUMBERS[code >> 4]] for code in range(256)],
        dtype=torch.float32,
        device="cpu",
    )
    .view(torch.int64)
    .view(-1)
)
