"""Comparing nested states to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["assert_same", "bits"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself and 0.0 is not -0.0."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)


def assert_same(found: Any, wanted: Any, path: str = "state") -> None:
    """Raise unless two nested states have the same types, keys, dtypes, shapes and bits."""
    assert type(found) is type(wanted), f"{path}: {type(found)} is not {type(wanted)}"
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert torch.equal(bits(found), bits(wanted)), f"{path}: {found} is not {wanted}"
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert found.tobytes() == wanted.tobytes(), f"{path}: {found} is not {wanted}"
    elif isinstance(wanted, dict):
        assert list(map(repr, found)) == list(map(repr, wanted)), path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), path
        for position, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, f"{path}[{position}]")
    else:
        assert found == wanted, f"{path}: {found!r} is not {wanted!r}"
