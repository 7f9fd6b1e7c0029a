"""torch's element types and their names."""

from __future__ import annotations

from typing import Final

import torch

from dcp_pipeline.core.dtypes import ITEM_SIZES

__all__ = ["DTYPES", "dtype_name"]

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_SIZES}
"""Every dtype that a checkpoint can hold, by name."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of ``dtype``, ``None`` where no checkpoint can hold it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return _NAMES.get(dtype)
