"""Between sharded states and full ones, one tensor at a time.

These are collectives of their own, as torch's state-dict helpers are: all ranks take part, with the
same keys in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.errors import ShapeMismatchError, list_some
from dcp_pipeline.state.pieces import pieces_of

__all__ = ["NOT_HERE", "gathered", "offloaded", "sent_from_first", "spread"]


def gathered(flat: Mapping[Any, Any], cpu_offload: bool) -> dict[Any, Any]:
    """Every ``DTensor`` as a whole tensor.

    Args:
        cpu_offload: to host memory, and on rank 0 alone; the others get nothing and hold no more
            than one whole tensor at a time.
    """
    keeps = not (cpu_offload and dist.is_initialized() and dist.get_rank() != 0)
    full: dict[Any, Any] = {}
    for key, value in flat.items():
        whole = value.full_tensor().detach() if isinstance(value, DTensor) else value
        if keeps:
            full[key] = offloaded(whole) if cpu_offload else whole
    return full


def offloaded(value: Any) -> Any:
    """A tensor in host memory; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


NOT_HERE = object()
"""What :data:`Like` says of a tensor that this rank has no part of."""

Like = Callable[[Any, torch.Tensor], Any]
"""Key and whole tensor to the tensor whose sharding and device it shall have, ``None`` where it is
to stay whole."""


@dataclass(frozen=True)
class _Form:
    """What is sent of a tensor before its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def sent_from_first(full: Mapping[Any, Any], like: Like) -> dict[Any, Any]:
    """Rank 0's full state, cut to this rank's shards.

    A tensor is sent whole and cut on arrival, so that no rank holds more than one of them. Of what
    is not here there is ``None``.

    Raises:
        ShapeMismatchError: tensors are not of the shape that is wanted. All ranks have taken part.
    """
    is_first = dist.get_rank() == 0
    sent = [{key: _form_of(value) for key, value in full.items()} if is_first else {}]
    dist.broadcast_object_list(sent, src=0)
    forms = sent[0]
    device = dist.distributed_c10d._get_pg_default_device()

    def received() -> Iterator[tuple[Any, Any]]:
        for key, form in forms.items():
            if not isinstance(form, _Form):
                yield key, form
                continue
            if is_first:
                whole = full[key].detach().to(device).contiguous()
            else:
                whole = torch.empty(form.shape, dtype=form.dtype, device=device)
            if whole.numel():
                dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
            yield key, whole

    return _all_cut(received(), like)


def spread(full: Mapping[Any, Any], like: Like) -> dict[Any, Any]:
    """A full state that every rank has, cut to this rank's shards.

    Raises:
        ShapeMismatchError: tensors are not of the shape that is wanted.
    """
    return _all_cut(iter(full.items()), like)


def _all_cut(full: Iterator[tuple[Any, Any]], like: Like) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    wrong: list[tuple[str, object, object]] = []
    for key, value in full:
        if not isinstance(value, torch.Tensor):
            result[key] = value
            continue
        target = like(key, value)
        if target is NOT_HERE:
            result[key] = None
        elif isinstance(target, torch.Tensor) and target.shape != value.shape:
            name = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
            wrong.append((name, list(value.shape), list(target.shape)))
        else:
            result[key] = _cut(value, target)
    if wrong:
        lines = [f"{name}: {given} given, {wanted} wanted" for name, given, wanted in wrong]
        raise ShapeMismatchError(list_some(lines), shapes=wrong)
    return result


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Form(tuple(value.shape), value.dtype)
    return value


def _cut(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of ``whole``, in memory of its own where it is only a part."""
    if not isinstance(like, torch.Tensor):
        return whole
    if isinstance(whole, DTensor) or not isinstance(like, DTensor):
        return whole.to(whole.device if like.is_meta else like.device)
    local = like.to_local()
    device = torch.device(like.device_mesh.device_type) if like.is_meta else local.device
    result = DTensor.from_local(
        torch.empty_like(local, dtype=whole.dtype, device=device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    with torch.no_grad():
        for piece in pieces_of(result).pieces:
            box = tuple(
                slice(begin, begin + extent)
                for begin, extent in zip(piece.offsets, piece.sizes, strict=True)
            )
            piece.data.copy_(whole[box])
    return result
