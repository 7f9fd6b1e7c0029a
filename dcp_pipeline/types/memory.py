"""The bytes of tensors, without copies where the memory allows it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

__all__ = ["bytes_of", "is_plain_memory", "segments_of"]

_SLAB_BYTES = 8 << 20


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie one after another in host memory, as they read."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor for which :func:`is_plain_memory` holds.

    The view does not keep the tensor alive: the caller does.
    """
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")


def segments_of(tensor: torch.Tensor, slab_bytes: int = _SLAB_BYTES) -> Iterator[memoryview]:
    """The elements of any strided tensor as bytes in row-major order, in one or several views.

    A tensor that is not plain host memory is copied slab by slab, each of about ``slab_bytes``.
    A view is valid until the next is asked for.
    """
    if not isinstance(tensor, torch.Tensor):
        # A stand-in makes its elements itself: dcp_pipeline.types.streamed.
        yield from tensor.segments()
        return
    tensor = tensor.detach()
    if is_plain_memory(tensor):
        yield bytes_of(tensor)
        return
    for slab in _slabs(tensor, slab_bytes):
        host = slab.resolve_conj().resolve_neg().cpu().contiguous()
        yield bytes_of(host)


def _slabs(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= limit or tensor.dim() == 0:
        if nbytes:
            yield tensor
        return
    rows = tensor.shape[0]
    step = max(1, rows * limit // nbytes)
    for start in range(0, rows, step):
        part = tensor[start : start + step]
        if step == 1 and part.dim() > 1:
            yield from _slabs(part[0], limit)
        else:
            yield part
