"""Between sharded states and full ones, one tensor at a time.

These are collectives of their own, as torch's state-dict helpers are: all ranks take part, with the
same keys in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.errors import CheckpointError, ShapeMismatchError, list_some
from dcp_pipeline.state.pieces import pieces_of

__all__ = ["Form", "Target", "gathered", "offloaded", "sent_from_first", "spread"]


def gathered(flat: Mapping[Any, Any], cpu_offload: bool) -> dict[Any, Any]:
    """Every ``DTensor`` as a whole tensor.

    Args:
        cpu_offload: to host memory, and on rank 0 alone; the others get nothing.
    """
    if cpu_offload and dist.is_initialized():
        return _gathered_on_first(flat)
    return {
        key: value.full_tensor().detach() if isinstance(value, DTensor) else value
        for key, value in flat.items()
    }


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _gathered_on_first(flat: Mapping[Any, Any]) -> dict[Any, Any]:
    """Whole tensors on rank 0, to which every box is sent by one of the ranks that have it."""
    sharded = {key: value for key, value in flat.items() if isinstance(value, DTensor)}
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = {key: pieces_of(value).pieces for key, value in sharded.items()}
    mine = {key: [(piece.offsets, piece.sizes) for piece in found] for key, found in pieces.items()}
    boxes: list[dict[Any, list[Box]]] = [{}] * size
    dist.all_gather_object(boxes, mine)
    whole: dict[Any, Any] = {}
    for key in sharded:
        if rank == 0:
            value = sharded[key]
            whole[key] = torch.empty(tuple(value.shape), dtype=value.dtype, device="cpu")
    for key in dict.fromkeys(key for found in boxes for key in found):
        taken: set[Box] = set()
        for owner, found in enumerate(boxes):
            for place, box in enumerate(found.get(key, ())):
                # Keys of a stage that rank 0 has no part of stay where they are, as in torch.
                if box in taken or key not in boxes[0]:
                    continue
                taken.add(box)
                if owner == rank == 0:
                    _part(whole[key], box).copy_(pieces[key][place].data)
                elif owner == rank:
                    dist.send(_bytes(pieces[key][place].data.contiguous()), 0)
                elif rank == 0:
                    part = torch.empty(box[1], dtype=whole[key].dtype, device=sharded[key].device)
                    dist.recv(_bytes(part), owner)
                    _part(whole[key], box).copy_(part)
    if rank:
        return {}
    return {key: whole[key] if key in whole else offloaded(value) for key, value in flat.items()}


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    begin_and_extent = zip(*box, strict=True)
    return whole[tuple(slice(begin, begin + extent) for begin, extent in begin_and_extent)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def offloaded(value: Any) -> Any:
    """A tensor in host memory; anything else as it is."""
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Form:
    """What is known of a whole tensor before its values are."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Target:
    """Where a whole tensor goes.

    Attributes:
        like: the tensor whose sharding and device it gets; ``None`` to stay whole.
        is_own: whether it is written into that tensor, which has memory and its dtype.
        is_here: whether this rank has any part of it.
    """

    like: torch.Tensor | None = None
    is_own: bool = False
    is_here: bool = True


Find = Callable[[Any, Form], Target]
"""Where the tensor of a key goes."""


def form_of(value: Any) -> Any:
    """The form of a tensor; anything else as it is."""
    return Form(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def sent_from_first(
    full: Mapping[Any, Any], find: Find, check: Callable[[Collection[Any]], None]
) -> dict[Any, Any]:
    """Rank 0's full state, cut to this rank's shards.

    A tensor is sent whole and cut on arrival, so that no rank holds more than one of them. Of what
    is not here there is ``None``.

    Args:
        full: on rank 0; other ranks' is not looked at.
        check: is given all keys before anything is written, and may refuse them.

    Raises:
        CheckpointError: the keys or shapes do not fit on some rank. It is raised on all of them,
            before anything was written.
    """
    is_first = dist.get_rank() == 0
    sent = [{key: form_of(value) for key, value in full.items()} if is_first else {}]
    dist.broadcast_object_list(sent, src=0)
    forms = sent[0]
    refused: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(refused, _refusal(forms, find, check))
    for error in refused:
        if error is not None:
            raise error
    device = torch.device(dist.distributed_c10d._get_object_coll_device())
    result: dict[Any, Any] = {}
    for key, form in forms.items():
        if not isinstance(form, Form):
            result[key] = form
            continue
        if is_first:
            whole = full[key].detach().to(device).contiguous()
        else:
            whole = torch.empty(form.shape, dtype=form.dtype, device=device)
        if whole.numel():
            dist.broadcast(_bytes(whole), src=0)
        result[key] = _cut(whole, find(key, form))
        del whole  # before the next one comes
    return result


def spread(
    full: Mapping[Any, Any], find: Find, check: Callable[[Collection[Any]], None]
) -> dict[Any, Any]:
    """A full state that every rank has, cut to this rank's shards.

    Raises:
        CheckpointError: the keys or shapes do not fit; nothing was written.
    """
    error = _refusal({key: form_of(value) for key, value in full.items()}, find, check)
    if error is not None:
        raise error
    return {
        key: _cut(value, find(key, form_of(value))) if isinstance(value, torch.Tensor) else value
        for key, value in full.items()
    }


def _refusal(
    forms: Mapping[Any, Any], find: Find, check: Callable[[Collection[Any]], None]
) -> CheckpointError | None:
    """Why a full state does not fit here."""
    try:
        check(forms.keys())
    except CheckpointError as error:
        return error
    wrong: list[tuple[str, object, object]] = []
    for key, form in forms.items():
        like = find(key, form).like if isinstance(form, Form) else None
        if like is not None and tuple(like.shape) != form.shape:
            name = ".".join(map(str, key)) if isinstance(key, tuple) else str(key)
            wrong.append((name, list(form.shape), list(like.shape)))
    if not wrong:
        return None
    lines = [f"{name}: {given} given, {wanted} wanted" for name, given, wanted in wrong]
    return ShapeMismatchError(list_some(lines), shapes=wrong)


def _cut(whole: torch.Tensor, target: Target) -> torch.Tensor | None:
    """This rank's part of ``whole``."""
    like = target.like
    if not target.is_here:
        return None
    if like is None:
        return whole
    if isinstance(whole, DTensor) or not isinstance(like, DTensor):
        return whole.to(whole.device if like.is_meta else like.device)
    result = like
    if not (target.is_own and like.dtype == whole.dtype and not like.is_meta):
        result = _memory_like(like, whole.dtype)
    with torch.no_grad():
        for piece in pieces_of(result).pieces:
            piece.data.copy_(_part(whole, (piece.offsets, piece.sizes)))
    return result


def _memory_like(like: DTensor, dtype: torch.dtype) -> DTensor:
    local = like.to_local()
    device = torch.device(like.device_mesh.device_type) if like.is_meta else local.device
    return DTensor.from_local(
        torch.empty_like(local, dtype=dtype, device=device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
