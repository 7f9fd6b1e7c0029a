"""Finds for every leaf of a template what the checkpoint holds for it, before anything is read.

A leaf is found by its typed path, then by its dotted name. An empty container (or ``None``) in the
template takes whatever the checkpoint holds below its path, and a ``RankLocal`` the value of its
rank. A leaf that lies inside a value which was stored whole (DCP stores tuples so, and before torch
2.4 mappings without tensors) is taken out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import (
    CheckpointError,
    LoadMismatchError,
    UnsupportedLeafError,
    list_some,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path, dotted, is_prefix
from dcp_pipeline.core.quantized import QuantizedKeys
from dcp_pipeline.core.table import KeySpec, Kind
from dcp_pipeline.state.collect import tensor_of_array
from dcp_pipeline.state.flatten import FlatState, Leaf, Local
from dcp_pipeline.state.match_local import LocalValues, Resized, StoredValue, local_values
from dcp_pipeline.state.pieces import pieces_of
from dcp_pipeline.state.rank_local import rank_key
from dcp_pipeline.state.targets import (
    TensorTarget,
    ValueTarget,
    fresh_tensor,
    materialized,
    restored,
    stream_of,
)
from dcp_pipeline.types.entries import Piece

__all__ = ["FindCast", "Match", "match"]

logger = logging.getLogger("dcp_pipeline")

FindCast = Callable[[str, str, str], bool | None]
"""``(key, source, target)`` to whether overflow is an error; ``None`` where no cast is declared."""

_CONTAINERS: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "tuple": tuple}


@dataclass
class Match:
    """What a template gets from a checkpoint, and what does not fit.

    Attributes:
        tensors, values: what is read.
        made: path to what is put there without being read, as containers that the checkpoint knows
            to be empty.
        used: stored keys that this rank wants.
        missing, shapes, dtypes: as in :class:`LoadMismatchError`.
        notes: more to say about a missing key.
        resized: values of this rank alone that another number of ranks has saved.
        unwritable: tensors of the template that several elements share memory in.
        problems: where the rules do not fit the checkpoint.
    """

    tensors: list[TensorTarget] = field(default_factory=list)
    values: list[ValueTarget] = field(default_factory=list)
    made: dict[Path, Any] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    resized: list[Resized] = field(default_factory=list)
    unwritable: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    shapes: list[tuple[str, object, object]] = field(default_factory=list)
    dtypes: list[tuple[str, object, object]] = field(default_factory=list)

    def stored_bytes(self, quantized: QuantizedKeys) -> int:
        """Bytes of the tensors' elements that this rank wants, as they are stored."""
        total = 0
        for target in self.tensors:
            count = sum(piece.data.numel() for piece in target.pieces)
            one = quantized.get(target.key) if target.mapped is None else None
            total += count * ITEM_SIZES[target.dtype] if one is None else one.stored_bytes(count)
        return total


def match(
    flat: FlatState, manifest: Manifest, find_cast: FindCast, wants: Callable[[str], bool]
) -> Match:
    """Match a flattened template with a checkpoint; nothing is changed.

    Args:
        find_cast: which differences of dtype are declared.
        wants: whether a dotted key takes part at all.
    """
    matcher = _Matcher(manifest, find_cast)
    matcher.result.made.update(flat.put)
    for leaf in flat.leaves:
        if flat.local_at(leaf.path) is None and wants(dotted(leaf.path)):
            matcher.leaf(leaf)
    for path, _ in flat.empty:
        if flat.local_at(path) is None:
            matcher.empty_mapping(path, wants)
    stored = local_values(manifest) if flat.locals else {}
    for path, local in flat.locals.items():
        if wants(dotted(path)):
            matcher.local(local, stored.get(dotted(path)), flat)
    if matcher.result.unwritable:
        raise UnsupportedLeafError(
            f"the template holds expanded tensors, whose elements share memory, so that they cannot"
            f" be loaded into: {list_some(matcher.result.unwritable)}; clone() them first"
        )
    _check_shared(matcher.result, manifest)
    return matcher.result


def _check_shared(found: Match, manifest: Manifest) -> None:
    """Refuse values that differ and would go to one memory, of which the last would stay."""
    keys: dict[object, dict[int, str]] = {}
    for target in found.tensors:
        if target.path is None and target.pieces:
            places = tuple((p.data.data_ptr(), p.data.stride(), p.sizes) for p in target.pieces)
            keys.setdefault((places, target.pieces[0].data.dtype), {})[target.key] = target.name
    shared = [names for names in keys.values() if len(names) > 1]
    prints = manifest.fingerprint
    unequal, unknown = [], []
    for names in shared:
        values = {prints.of(name) if prints is not None else None for name in names.values()}
        if None in values:
            unknown.append(" and ".join(names.values()))
        elif len(values) > 1:
            unequal.append(" and ".join(names.values()))
    if unequal:
        raise LoadMismatchError(
            "tensors that are one here were saved with different values, of which only one could"
            f" be kept: {list_some(unequal)}; untie them, or leave one out"
        )
    if unknown:
        logger.warning(
            "tensors that are one here were saved apart, and whether with the same values is not"
            " recorded: %s",
            list_some(unknown),
        )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(extent > 1 and stride == 0 for extent, stride in pairs)


class _Matcher:
    def __init__(self, manifest: Manifest, find_cast: FindCast) -> None:
        self._keys = manifest.table.keys
        self._names = manifest.names
        self._by_path = {spec.path: key for key, spec in enumerate(self._keys)}
        self._by_name = {name: key for key, name in enumerate(self._names)}
        self._empty = dict(manifest.empty)
        self._find_cast = find_cast
        self.result = Match()

    def leaf(self, leaf: Leaf) -> None:
        key = self._find(leaf.source or leaf.path)
        if key is not None:
            self.result.used.add(key)
            self._pair(leaf, key)
        elif not (self._is_open(leaf) and self._fill(leaf.path, None)) and not self._inside(leaf):
            self.result.missing.append(dotted(leaf.path))

    def empty_mapping(self, path: Path, wants: Callable[[str], bool]) -> None:
        key = self._find(path) if path else None
        if key is not None and self._keys[key].kind is Kind.VALUE:
            self.result.used.add(key)
            self.result.values.append(ValueTarget(self._names[key], key, path))
            return
        self._fill(path, wants)

    def local(self, local: Local, stored: LocalValues | None, flat: FlatState) -> None:
        """Take the whole value of the rank whose value it is to be."""
        name, result = dotted(local.path), self.result
        if stored is None:
            result.missing.append(name)
            if self._has(local.path):
                result.notes[name] = "what is there was saved without RankLocal"
            return
        result.used.update(stored.keys())
        saved = stored.nearest_size(flat.world_size)
        rank = flat.rank
        if saved != flat.world_size:
            rule = local.owner.on_resize
            result.resized.append(Resized(name, saved, flat.world_size, rule))
            if rule != "first":
                return
            rank = min(stored.by_size[saved])
        value = stored.by_size[saved].get(rank)
        if value is None:
            result.missing.append(dotted((*local.path, rank_key(rank, saved))))
            result.notes[result.missing[-1]] = "this rank has saved no value"
            return
        self._take_value(value, local.inner)
        for entry in flat.expanded:
            if flat.local_at(entry.path) is local:
                self._check_object(value, entry.path[len(local.inner) :])

    def _has(self, path: Path) -> bool:
        inside = (spec.path for spec in self._keys if len(spec.path) >= len(path))
        return any(_lies_below(path, stored) for stored in (*inside, *self._empty))

    def _take_value(self, value: StoredValue, path: Path) -> None:
        depth = len(value.path)
        for key in value.keys:
            self._take_whole(key, (*path, *self._keys[key].path[depth:]))
        for empty, kind in value.empty:
            self.result.made[(*path, *empty[depth:])] = _CONTAINERS[kind]()

    def _check_object(self, value: StoredValue, inside: Path) -> None:
        """An object that finds nothing of its own in ``value`` would be lost."""
        wanted = (*value.path, *inside)
        paths = [self._keys[key].path for key in value.keys] + [path for path, _ in value.empty]
        for path in paths:
            # Above it lies what DCP has stored whole.
            if is_prefix(wanted, path) or is_prefix(path, wanted):
                return
        self.result.missing.append(dotted(wanted))

    def _find(self, path: Path) -> int | None:
        key = self._by_path.get(path)
        if key is None:
            key = self._by_name.get(dotted(path))
            # A name that was made up to tell two paths apart is not what anybody asks for.
            if key is not None and self._names[key] != dotted(self._keys[key].path):
                return None
        return key

    def _is_open(self, leaf: Leaf) -> bool:
        value = leaf.value
        return value is None or (leaf.kind is Kind.VALUE and value in ([], (), {}))

    def _fill(self, path: Path, wants: Callable[[str], bool] | None) -> bool:
        """Take everything that is stored below ``path``."""
        depth, found = len(path), False
        if path and path in self._empty:
            self.result.made[path] = _CONTAINERS[self._empty[path]]()
            return True
        for key, spec in enumerate(self._keys):
            if len(spec.path) <= depth or not _lies_below(path, spec.path):
                continue
            if wants is not None and not wants(self._names[key]):
                continue
            found = True
            self.result.used.add(key)
            self._take_whole(key, (*path, *spec.path[depth:]))
        for empty in self._empty:
            is_below = len(empty) > depth and empty[:depth] == path
            if is_below and (wants is None or wants(dotted(empty))):
                self.result.made[empty] = _CONTAINERS[self._empty[empty]]()
        return found

    def _take_whole(self, key: int, path: Path) -> None:
        spec = self._keys[key]
        if spec.dtype is None:
            convert = stream_of if spec.kind is Kind.STREAM else _same
            self.result.values.append(ValueTarget(self._names[key], key, path, convert=convert))
            return
        tensor = fresh_tensor(spec)
        self._add_tensor(key, spec.dtype, _whole(tensor), path, lambda: restored(spec.kind, tensor))

    def _inside(self, leaf: Leaf) -> bool:
        """Take a leaf out of a value that was stored whole."""
        for depth in range(len(leaf.path) - 1, 0, -1):
            key = self._find(leaf.path[:depth])
            if key is None or self._keys[key].kind is not Kind.VALUE:
                continue
            self.result.used.add(key)
            in_place = leaf.kind is Kind.TENSOR and leaf.value.device.type != "meta"
            target = leaf.value if in_place else None
            self.result.values.append(
                ValueTarget(self._names[key], key, leaf.path, leaf.path[depth:], target=target)
            )
            return True
        return False

    def _pair(self, leaf: Leaf, key: int) -> None:
        spec, name = self._keys[key], self._names[key]
        if leaf.kind is Kind.TENSOR:
            self._pair_tensor(leaf, key, spec, name)
        elif spec.dtype is None:
            convert = stream_of if Kind.STREAM in (leaf.kind, spec.kind) else _same
            self.result.values.append(ValueTarget(name, key, leaf.path, convert=convert))
        elif leaf.kind is Kind.ARRAY:
            self._pair_array(leaf, key, spec, name)
        elif leaf.kind is Kind.SCALAR or leaf.value is None or spec.kind is Kind.SCALAR:
            self._take_whole(key, leaf.path)
        else:
            self.result.dtypes.append((name, spec.dtype, type(leaf.value).__name__))

    def _pair_tensor(self, leaf: Leaf, key: int, spec: KeySpec, name: str) -> None:
        if spec.dtype is None:
            self.result.dtypes.append((name, f"a Python {spec.kind}", str(leaf.value.dtype)))
            return
        if tuple(leaf.value.shape) != spec.shape:
            self.result.shapes.append((name, list(spec.shape), list(leaf.value.shape)))
            return
        is_meta = leaf.value.device.type == "meta"
        value = materialized(leaf.value) if is_meta else leaf.value
        sharded = pieces_of(value)
        if any(_overlaps_itself(piece.data) for piece in sharded.pieces):
            self.result.unwritable.append(name)
            return
        path = leaf.path if is_meta or leaf.is_made else None
        self._add_tensor(key, sharded.dtype, sharded.pieces, path, lambda: value)

    def _pair_array(self, leaf: Leaf, key: int, spec: KeySpec, name: str) -> None:
        if tuple(leaf.value.shape) != spec.shape:
            self.result.shapes.append((name, list(spec.shape), list(leaf.value.shape)))
            return
        try:
            tensor = tensor_of_array(leaf.value)
        except CheckpointError:
            self.result.dtypes.append((name, spec.dtype, str(leaf.value.dtype)))
            return
        is_shared = tensor.data_ptr() == leaf.value.__array_interface__["data"][0]
        path = None if is_shared else leaf.path
        target = pieces_of(tensor)
        self._add_tensor(key, target.dtype, _whole(tensor), path, tensor.numpy)

    def _add_tensor(
        self,
        key: int,
        dtype: str,
        pieces: tuple[Piece, ...],
        path: Path | None,
        value: Callable[[], Any],
    ) -> None:
        spec, name = self._keys[key], self._names[key]
        assert spec.dtype is not None
        overflow: bool | None = False
        if dtype != spec.dtype:
            overflow = self._find_cast(name, spec.dtype, dtype)
            if overflow is None:
                self.result.dtypes.append((name, spec.dtype, dtype))
                return
        source = spec.alias if spec.alias >= 0 else key
        self.result.tensors.append(
            TensorTarget(
                name,
                source,
                spec.dtype,
                pieces,
                path,
                value,
                target_dtype=dtype if dtype != spec.dtype else None,
                fails_on_overflow=bool(overflow),
            )
        )


def _same(value: Any) -> Any:
    return value


def _whole(tensor: torch.Tensor) -> tuple[Piece, ...]:
    if tensor.numel() == 0:
        return ()
    return (Piece((0,) * tensor.dim(), tuple(tensor.shape), tensor),)


def _lies_below(path: Path, stored: Path) -> bool:
    return all(
        mine == theirs or str(dotted((mine,))) == dotted((theirs,))
        for mine, theirs in zip(path, stored, strict=False)
    )


def take_inside(value: Any, inside: Path) -> Any:
    """The part of a stored container that lies at ``inside``.

    Raises:
        KeyError: there is none.
    """
    for component in inside:
        if isinstance(value, Mapping):
            by_text = {str(key): key for key in value}
            key = component if component in value else by_text[dotted((component,))]
            value = value[key]
        else:
            value = value[int(dotted((component,)))]
    return value
