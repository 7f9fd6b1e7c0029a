"""From the caller's state to entries: what the save is going to write, or why it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_pipeline.core.errors import CheckpointError, UnsupportedLeafError
from dcp_pipeline.core.path import dotted
from dcp_pipeline.core.table import Kind
from dcp_pipeline.state.flatten import FlatState, Leaf
from dcp_pipeline.state.pieces import pieces_of
from dcp_pipeline.types.entries import Entries, Entry

__all__ = ["EncodeValue", "collect", "tensor_of_array"]

EncodeValue = Callable[[Any], tuple[bytes, int]]
"""A value's stored bytes and the digest of its meaning; raises for what cannot be stored."""


def _any(name: str) -> None:
    return None


def collect(
    flat: FlatState,
    encode_value: EncodeValue,
    check_name: Callable[[str], None] = _any,
    check_dtype: Callable[[str], None] = _any,
) -> Entries:
    """The entries of a flattened state.

    Args:
        check_name, check_dtype: raise ``UnsupportedLeafError`` for the name of a key, or for the
            dtype of a tensor, that cannot be written.

    Raises:
        UnsupportedLeafError: one message for every leaf that cannot be stored.
    """
    entries = Entries()
    problems: list[str] = []
    for leaf in flat.leaves:
        try:
            check_name(dotted(leaf.path))
            entry = _entry(leaf, encode_value)
            if entry.dtype is not None:
                check_dtype(entry.dtype)
            entries.append(entry if flat.local_at(leaf.path) is None else _of_one_rank(leaf, entry))
        except CheckpointError as error:
            problems.append(f"{dotted(leaf.path)!r} is {error}")
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # Tensors of many kinds refuse to be looked at, each in words of its own.
            kind = type(leaf.value).__name__
            problems.append(f"{dotted(leaf.path)!r} is a {kind} that cannot be stored: {error}")
    if problems:
        shown = "; ".join(problems[:20]) + (
            f"; and {len(problems) - 20} more" * (len(problems) > 20)
        )
        raise UnsupportedLeafError(f"{len(problems)} leaves of the state cannot be stored: {shown}")
    return _with_aliases(entries, [flat.local_at(leaf.path) is not None for leaf in flat.leaves])


def _of_one_rank(leaf: Leaf, entry: Entry) -> Entry:
    if leaf.kind is Kind.TENSOR and isinstance(leaf.value, (DTensor, ShardedTensor)):
        kind = type(leaf.value).__name__
        raise UnsupportedLeafError(
            f"a {kind} in a RankLocal, but of all its ranks; save it outside, or its local part"
        )
    return replace(entry, may_repeat=False)


def _entry(leaf: Leaf, encode_value: EncodeValue) -> Entry:
    value = leaf.value
    if leaf.kind in (Kind.VALUE, Kind.STREAM):
        payload, digest = encode_value(value.getvalue() if leaf.kind is Kind.STREAM else value)
        return Entry(leaf.path, leaf.kind, payload=payload, digest=digest)
    if leaf.kind in (Kind.ARRAY, Kind.SCALAR):
        value = tensor_of_array(value)
    is_plain = type(value) is torch.Tensor
    if value.is_meta if is_plain else value.device.type == "meta":
        raise UnsupportedLeafError("a tensor on the meta device, which has no values")
    sharded = pieces_of(value)
    return Entry(
        leaf.path,
        leaf.kind,
        sharded.dtype,
        sharded.shape,
        sharded.pieces,
        b"",
        sharded.may_repeat,
    )


def tensor_of_array(array: np.ndarray[Any, Any] | np.generic) -> torch.Tensor:
    """A tensor over the memory of a NumPy array (copied where torch cannot share it).

    Raises:
        UnsupportedLeafError: strings, objects, dates and records.
    """
    plain = np.asarray(array)
    if plain.dtype.kind not in "biufc" or plain.dtype.itemsize > 16:
        raise UnsupportedLeafError(f"a NumPy value of dtype {plain.dtype}")
    native = plain.astype(plain.dtype.newbyteorder("="), copy=False)
    if not native.flags.writeable or any(stride < 0 for stride in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise UnsupportedLeafError(f"a NumPy value of dtype {plain.dtype}") from error


def _with_aliases(entries: Entries, local: list[bool]) -> Entries:
    """Entries over the very same memory point at the first of them, so that it is stored once.

    What is of one rank points at nothing that all ranks have: theirs may be another rank's.
    """
    starts = [entry.pieces[0].data.data_ptr() if entry.pieces else None for entry in entries]
    repeated = {start for start, times in Counter(starts).items() if times > 1 and start}
    if not repeated:
        return entries
    first: dict[object, int] = {}
    result = Entries()
    for position, (entry, start) in enumerate(zip(entries, starts, strict=True)):
        earlier = position
        if start in repeated:
            earlier = first.setdefault((local[position], _memory_of(entry)), position)
        result.append(entry if earlier == position else replace(entry, alias=earlier))
    return result


def _memory_of(entry: Entry) -> object:
    places = tuple(
        (
            piece.data.data_ptr(),
            piece.data.stride(),
            piece.data.is_conj(),
            piece.data.is_neg(),
            piece.offsets,
            piece.sizes,
        )
        for piece in entry.pieces
    )
    return (entry.kind, entry.dtype, entry.shape, str(entry.pieces[0].data.device), places)
