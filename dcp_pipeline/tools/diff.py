"""Compares two checkpoints of any layouts, slab by slab; neither is ever in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from typing import Any

import torch

from dcp_pipeline.core.errors import CheckpointError, ConfigError, list_some
from dcp_pipeline.core.kind import parse_bytes
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import dotted
from dcp_pipeline.core.registry import model_of
from dcp_pipeline.core.shown import shown
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.formats.sharing import is_endless
from dcp_pipeline.formats.typed_json import canonical
from dcp_pipeline.layout.foreign import open_source
from dcp_pipeline.pipelines.convert import Buffers
from dcp_pipeline.pipelines.source import SourceReader
from dcp_pipeline.pipelines.steps.mapped_view import stored_tensors
from dcp_pipeline.rules.base import matches
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.diff_report import Difference, DiffReport
from dcp_pipeline.tools.diff_values import Tally
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.streamed import Streamed

__all__ = ["DiffReport", "Difference", "diff"]

_LEAST_MEMORY = 128 << 20
"""Of a thread: two slabs, what is read of blocks around them, and wide numbers."""
_SPARE_BYTES = 112 << 20
_MAX_SLAB = 64 << 20
_SHOWN = 200


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    threads: int = 4,
    memory: int | str = "2GiB",
) -> DiffReport:
    """What is different between the checkpoints ``a`` and ``b``, key by key.

    Tensors whose fingerprints both have recorded, and which are equal, are not read.

    Args:
        rtol, atol: elements are alike if ``|a - b| <= atol + rtol * |b|``; with neither if their
            bits are. What is not a number is like what is not a number.
        only, drop: globs on names: which are compared, and which of these are not.
        threads: that read and compare, each another key.
        memory: bytes that tensors may take, beside what the process has.

    Raises:
        ConfigError: a wrong argument, or a glob that fits no name.
        CheckpointNotFoundError: one of them is not there.
        CorruptCheckpointError: what is read is not what was written.

    Example:
        >>> import tempfile, dcp_pipeline as dcp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name, last in (("a", 2.0), ("b", 2.5)):
        ...         state = {"w": torch.tensor([1.0, last]), "step": 3}
        ...         _ = dcp.save(state, checkpoint_id=f"{folder}/{name}")
        ...     found = diff(f"{folder}/a", f"{folder}/b")
        ...     [(one.name, one.different, one.first, one.max_abs) for one in found.differences]
        [('w', 1, (1,), 0.5)]
    """
    slab_bytes = _slab_bytes(rtol, atol, threads, memory)
    opened = [_opened(os.fspath(path)) for path in (a, b)]
    names = [
        [name for name in manifest.names if _is_asked(name, only, drop)] for _, manifest in opened
    ]
    _check_globs([name for _, manifest in opened for name in manifest.names], only, drop)
    (place_a, manifest_a), (place_b, manifest_b) = opened
    with (
        SourceReader(place_a, manifest_a, stored_tensors(manifest_a)) as reader_a,
        SourceReader(place_b, manifest_b, stored_tensors(manifest_b)) as reader_b,
        ThreadPoolExecutor(threads, "dcp_pipeline diff") as pool,
    ):
        comparison = _Comparison(
            _Side(manifest_a, reader_a), _Side(manifest_b, reader_b), rtol, atol, slab_bytes
        )
        try:
            found = list(pool.map(comparison.of, names[0]))
        except BaseException:
            comparison.stop()
            raise
    there = set(names[0])
    found += [
        Difference(name, "only in b", "", _described(comparison.b.specs[name]))
        for name in names[1]
        if name not in there
    ]
    # An empty list may be a value, where an empty dict is none: one line is enough for both.
    said = {difference.name for difference in found if difference is not None}
    empty = _empty_containers(manifest_a, manifest_b, only, drop)
    found += [difference for difference in empty if difference.name not in said]
    return DiffReport(
        place_a.location,
        place_b.location,
        manifest_a.layout,
        manifest_b.layout,
        len(there & set(names[1])),
        comparison.by_fingerprint,
        comparison.nbytes,
        tuple(difference for difference in found if difference is not None),
    )


def _slab_bytes(rtol: float, atol: float, threads: int, memory: int | str) -> int:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not 0 <= value < float("inf"):
            raise ConfigError(f"a tolerance is a number from 0 on, found {value!r}", name)
    if threads < 1:
        raise ConfigError(f"at least one thread is needed, found {threads}", "threads")
    try:
        budget = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"{error}, found {memory!r}", "memory") from error
    if not isinstance(budget, int) or budget < _LEAST_MEMORY * threads:
        raise ConfigError(
            f"memory is at least 128MiB for each of the {threads} threads, found {memory!r}",
            "memory",
        )
    return min((budget // threads - _SPARE_BYTES) // 2, _MAX_SLAB)


def _opened(path: str) -> tuple[Directory, Manifest]:
    return open_source(path)


def _is_asked(name: str, only: Sequence[str], drop: Sequence[str]) -> bool:
    return (not only or matches(name, only)) and not matches(name, drop)


def _check_globs(names: list[str], only: Sequence[str], drop: Sequence[str]) -> None:
    unused = [glob for glob in (*only, *drop) if not any(matches(name, [glob]) for name in names)]
    if unused:
        raise ConfigError(
            f"no key of either checkpoint matches {list_some(map(repr, unused))}; there are, for"
            f" instance, {list_some(map(repr, names), 5)}"
        )


def _described(spec: KeySpec) -> str:
    return "value" if spec.dtype is None else f"{spec.dtype} {list(spec.shape)}"


class _Side:
    """One of the two checkpoints.

    Attributes:
        specs: by name.
    """

    def __init__(self, manifest: Manifest, reader: SourceReader) -> None:
        self.specs = dict(zip(manifest.names, manifest.table.keys, strict=True))
        self.fill = reader.fill
        self.kind = manifest.serialization
        self._fingerprint = manifest.fingerprint
        self._read = reader.value
        self._decode = model_of("serialization", self.kind)(kind=self.kind).build().decode_value

    def fingerprint(self, name: str) -> str | None:
        return None if self._fingerprint is None else self._fingerprint.of(name)

    def stored(self, name: str) -> bytes:
        return self._read(name)

    def decoded(self, name: str, data: bytes) -> Any:
        try:
            return self._decode(data)
        except CheckpointError as error:
            error.args = (f"the value {name!r} cannot be compared: {error}", *error.args[1:])
            raise


class _Comparison:
    """Compares keys, several at a time.

    Attributes:
        by_fingerprint, nbytes: see :class:`DiffReport`.
    """

    def __init__(self, a: _Side, b: _Side, rtol: float, atol: float, slab_bytes: int) -> None:
        self.a, self.b = a, b
        self._rtol, self._atol, self._slab_bytes = rtol, atol, slab_bytes
        self._buffers = (Buffers(), Buffers())
        self._lock = threading.Lock()
        self._is_stopped = False
        self.by_fingerprint = self.nbytes = 0

    def stop(self) -> None:
        """Let the other threads come to an end: one has failed."""
        self._is_stopped = True

    def of(self, name: str) -> Difference | None:
        """How a key of ``a`` differs in ``b``, if it does."""
        one, other = self.a.specs[name], self.b.specs.get(name)
        if other is None:
            return Difference(name, "only in a", _described(one))
        both = (_described(one), _described(other))
        if (one.dtype is None) != (other.dtype is None):
            return Difference(name, "kind", *both)
        if one.shape != other.shape:
            return Difference(name, "shape", *both)
        if one.dtype == other.dtype:
            recorded = self.a.fingerprint(name)
            if recorded is not None and recorded == self.b.fingerprint(name):
                with self._lock:
                    self.by_fingerprint += 1
                return None
        if one.dtype is None:
            return self._value(name)
        return self._tensor(name, one, other, both)

    def _tensor(
        self, name: str, one: KeySpec, other: KeySpec, both: tuple[str, str]
    ) -> Difference | None:
        assert one.dtype is not None and other.dtype is not None
        tally = Tally(self._rtol, self._atol)
        itemsize, beside_dtype = other.item_size, DTYPES[other.dtype]

        def fill(offsets: tuple[int, ...], memory: torch.Tensor) -> None:
            if self._is_stopped:
                raise CheckpointError("another thread has failed")
            self.a.fill(name, offsets, memory)
            held = self._buffers[1](memory.numel() * itemsize)[: memory.numel() * itemsize]
            beside = held.view(beside_dtype).view(memory.shape)
            self.b.fill(name, offsets, beside)
            tally.add(offsets, memory, beside)

        zeros = (0,) * len(one.shape)
        # The wider of the two has to fit.
        slab_bytes = self._slab_bytes * one.item_size // max(one.item_size, itemsize)
        made = Streamed(fill, one.dtype, zeros, one.shape, slab_bytes, self._buffers[0])
        for _ in made.segments():
            pass  # each was compared when it was filled
        with self._lock:
            self.nbytes += prod(one.shape) * one.item_size
        counted = Difference(
            name,
            "values",
            *tally.values,
            elements=tally.elements,
            different=tally.different,
            max_abs=tally.max_abs,
            max_rel=tally.max_rel,
            first=tally.first,
        )
        if one.dtype == other.dtype:
            return counted if tally.different else None
        return replace(
            counted, what="dtype and values" if tally.different else "dtype", a=both[0], b=both[1]
        )

    def _value(self, name: str) -> Difference | None:
        data = [side.stored(name) for side in (self.a, self.b)]
        if data[0] == data[1] and self.a.kind == self.b.kind:
            return None
        values = [side.decoded(name, one) for side, one in zip((self.a, self.b), data, strict=True)]
        if not any(map(is_endless, values)):
            if _are_equal(*values):
                return None
            return Difference(name, "value", _shown(values[0]), _shown(values[1]))
        # Neither compared nor shown as a whole: their bytes differ.
        return Difference(name, "value", shown(values[0]), shown(values[1]))


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two values mean the same; what is not a number is like what is not a number."""
    texts = canonical(a), canonical(b)
    if None not in texts:
        return texts[0] == texts[1]
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):  # as arrays raise, whose truth is not one
        return False


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _empty_containers(
    a: Manifest, b: Manifest, only: Sequence[str], drop: Sequence[str]
) -> list[Difference]:
    """Containers that hold nothing, where both checkpoints can say so."""
    if a.is_foreign or b.is_foreign or {a.layout, b.layout} != {"dcp"}:
        return []
    found = [
        {dotted(path): kind for path, kind in manifest.empty if _is_asked(dotted(path), only, drop)}
        for manifest in (a, b)
    ]
    differences = []
    for name in dict.fromkeys((*found[0], *found[1])):
        one, other = (side.get(name, "") for side in found)
        if one != other:
            what = "value" if one and other else "only in a" if one else "only in b"
            differences.append(
                Difference(name, what, one and f"empty {one}", other and f"empty {other}")
            )
    return differences
