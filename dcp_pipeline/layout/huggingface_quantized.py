"""Which tensors of a repository are codes and scales, and the tensors that they stand for.

The result has the key of the codes (``x.weight``, ``x_blocks``); that of the scales is gone.
"""

from __future__ import annotations

from dataclasses import replace

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.quantized import CODES, SCALES, Method, Quantized
from dcp_pipeline.layout.huggingface_reading import Repository, StoredChunk

__all__ = ["dequantized"]

_GROUP_BYTES = 16


def dequantized(found: Repository, dtype: str, block: tuple[int, int]) -> dict[str, Quantized]:
    """Replace codes and scales in ``found`` by what they stand for.

    Args:
        dtype: of the results.
        block: rows and columns that share a scale of ``*.weight_scale_inv``.

    Returns:
        How the elements of each result come about.

    Raises:
        FormatError: codes and scales that do not fit each other.
    """
    results = {}
    for scales_key in list(found.chunks):
        for method, codes_key in _codes_of(scales_key):
            if codes_key not in found.chunks:
                continue
            if found.chunks[codes_key][0].dtype not in CODES[method]:
                continue
            codes, scales = _whole(found, codes_key), _whole(found, scales_key)
            if scales.dtype not in SCALES[method]:
                raise FormatError(f"{scales_key!r} is {scales.dtype}, which no scales are known in")
            if method == "mxfp4":
                one, shape = _mxfp4(codes, scales, codes_key, scales_key)
            else:
                one, shape = _blocks(codes, scales, block, codes_key, scales_key)
            results[codes_key] = one
            offsets = (0,) * len(shape)
            found.chunks[codes_key] = [replace(codes, dtype=dtype, offsets=offsets, sizes=shape)]
            del found.chunks[scales_key]
    return results


def _codes_of(key: str) -> list[tuple[Method, str]]:
    """How a key of scales would be called for, and the key of its codes."""
    if key.endswith(".weight_scale_inv"):
        return [("blocks", key.removesuffix("_scale_inv"))]
    if key.endswith("_scales"):
        return [("mxfp4", f"{key.removesuffix('_scales')}_blocks")]
    return []


def _whole(found: Repository, key: str) -> StoredChunk:
    chunks = found.chunks[key]
    if len(chunks) > 1 or any(chunks[0].offsets) or chunks[0].same_as or chunks[0].payload < 0:
        raise FormatError(f"{key!r} is cut or shared: such codes and scales cannot be dequantized")
    return chunks[0]


def _blocks(
    codes: StoredChunk, scales: StoredChunk, block: tuple[int, int], codes_key: str, scales_key: str
) -> tuple[Quantized, tuple[int, ...]]:
    shape = codes.sizes
    steps = (*(1 for _ in shape[:-2]), *block)
    one = Quantized("blocks", codes.dtype, scales.dtype, steps, scales.file, scales.begin)
    if len(shape) < 2 or one.scales_shape(shape) != scales.sizes:
        raise FormatError(
            f"{scales_key!r} has sizes {list(scales.sizes)}, which do not fit {codes_key!r} of"
            f" sizes {list(shape)} in blocks of {list(block)}"
        )
    return one, shape


def _mxfp4(
    codes: StoredChunk, scales: StoredChunk, codes_key: str, scales_key: str
) -> tuple[Quantized, tuple[int, ...]]:
    if codes.sizes[:-1] != scales.sizes or codes.sizes[-1:] != (_GROUP_BYTES,) or not scales.sizes:
        raise FormatError(
            f"{scales_key!r} has sizes {list(scales.sizes)}, which do not fit {codes_key!r} of"
            f" sizes {list(codes.sizes)}: expected the same and {_GROUP_BYTES} more"
        )
    *above, groups = scales.sizes
    steps = (*(1 for _ in above), _GROUP_BYTES)
    one = Quantized("mxfp4", codes.dtype, scales.dtype, steps, scales.file, scales.begin)
    return one, (*above, groups * _GROUP_BYTES * one.per_code)
