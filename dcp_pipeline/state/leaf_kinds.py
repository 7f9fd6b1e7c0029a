"""Which values of a state are leaves, and of what kind."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_pipeline.core.table import Kind
from dcp_pipeline.types.dcp import Stateful

__all__ = ["is_stateful", "is_tensor_like", "is_wrapper", "leaf_kind", "parts_of"]


def is_tensor_like(value: object) -> bool:
    """Whether ``value`` is stored in chunks: a tensor, or what follows DCP's protocol for one."""
    return isinstance(value, torch.Tensor) or (
        hasattr(value, "__create_chunk_list__") and not isinstance(value, type)
    )


def is_wrapper(value: object) -> bool:
    """Whether ``value`` is made of other tensors, as quantized weights are: these are stored.

    The class says which they are by ``__tensor_flatten__``, as for ``torch.compile``.
    """
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
        return False
    return (
        is_traceable_wrapper_subclass(value)
        and not hasattr(value, "__create_chunk_list__")
        and not isinstance(value, AsyncCollectiveTensor)
        and not value.is_nested
    )


def parts_of(wrapper: object) -> dict[str, torch.Tensor]:
    """The tensors that a wrapper is made of."""
    names, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(wrapper, name) for name in names}


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object that saves and restores itself."""
    return isinstance(value, Stateful) and not isinstance(value, (type, torch.Tensor))


def leaf_kind(value: object) -> Kind | None:
    """The kind of a leaf, ``None`` for what is entered."""
    if is_tensor_like(value):
        return Kind.TENSOR
    if isinstance(value, np.ndarray):
        return Kind.ARRAY
    if isinstance(value, np.generic):
        return Kind.SCALAR
    if isinstance(value, io.BytesIO):
        return Kind.STREAM
    if isinstance(value, Mapping) or is_stateful(value):
        return None
    if isinstance(value, list):
        return None if any(map(_holds_items, value)) else Kind.VALUE
    if isinstance(value, tuple):
        return None if any(map(_holds_tensors, value)) else Kind.VALUE
    return Kind.VALUE


def _holds_items(value: object) -> bool:
    if isinstance(value, Mapping):
        return True
    if isinstance(value, list):
        return any(map(_holds_items, value))
    return _holds_tensors(value)


def _holds_tensors(value: object) -> bool:
    if is_tensor_like(value) or isinstance(value, np.ndarray) or is_stateful(value):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))
