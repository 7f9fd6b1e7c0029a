"""Where the tensors and values of a checkpoint go in the caller's state."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.table import KeySpec, Kind
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Piece

__all__ = ["TensorTarget", "ValueTarget", "fresh_tensor", "materialized", "restored"]


@dataclass(frozen=True)
class TensorTarget:
    """A tensor of the checkpoint and the memory that it is read into.

    Attributes:
        name, key: the stored key.
        dtype: name of the stored element type.
        pieces: boxes of the global tensor and their memory on this rank.
        path: where ``value`` is put once all is read, ``None`` for a tensor that is read in place.
        value: makes what is put there.
        target_dtype: name of the element type of ``pieces``, where a cast is declared.
        fails_on_overflow: whether a value that does not fit the target dtype is an error.
        mapped: how rules make it of stored tensors; ``None`` for a stored one as it is.
    """

    name: str
    key: int
    dtype: str
    pieces: tuple[Piece, ...]
    path: Path | None = None
    value: Callable[[], Any] | None = None
    target_dtype: str | None = None
    fails_on_overflow: bool = False
    mapped: Mapped | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the memory is new, so that there is nothing in it to restore."""
        return self.path is not None


@dataclass(frozen=True)
class ValueTarget:
    """A value of the checkpoint and the place in the state that it goes to.

    Attributes:
        name, key: the stored key.
        path: where it is put.
        inside: path within the stored value, for a leaf of a container that was stored whole.
        convert: applied to the value.
        target: tensor that takes the value in place, for a tensor within a stored container.
    """

    name: str
    key: int
    path: Path
    inside: Path = ()
    convert: Callable[[Any], Any] = lambda value: value
    target: torch.Tensor | None = None


def fresh_tensor(spec: KeySpec) -> torch.Tensor:
    """Uninitialised host memory for a whole stored tensor."""
    assert spec.dtype is not None
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cpu")


def materialized(value: Any) -> Any:
    """A meta tensor's counterpart with memory: on the device of the mesh or group, or CPU."""
    if isinstance(value, DTensor):
        device = _current(value.device_mesh.device_type)
        local = torch.empty_like(value.to_local(), device=device)
        return DTensor.from_local(
            local,
            device_mesh=value.device_mesh,
            placements=value.placements,
            run_check=False,
            shape=value.size(),
            stride=value.stride(),
        )
    device_type = "cpu"
    if dist.is_available() and dist.is_initialized():
        device_type = dist.distributed_c10d._get_object_coll_device()
    return torch.empty_like(value, device=_current(device_type))


def _current(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def restored(kind: Kind, tensor: torch.Tensor) -> Any:
    """A stored tensor as what it was in the state that was saved."""
    if kind is Kind.ARRAY:
        return tensor.numpy()
    if kind is Kind.SCALAR:
        return tensor.numpy()[()]
    return tensor


def stream_of(value: Any) -> io.BytesIO:
    """Bytes as the stream that they were saved from."""
    return io.BytesIO(bytes(value))
