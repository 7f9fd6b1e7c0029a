"""The checkpoints that a conversion reads: opened, filtered, passed through the rules, averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from dcp_pipeline.core.errors import (
    CheckpointError,
    ConfigError,
    LoadMismatchError,
    RuleError,
    list_some,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.registry import model_of
from dcp_pipeline.core.table import Kind
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.pipelines.source import SourceReader
from dcp_pipeline.pipelines.steps.destinations import cast_into
from dcp_pipeline.pipelines.steps.mapped_view import stored_tensors
from dcp_pipeline.rules.base import Rule, matches
from dcp_pipeline.rules.mapping import Outcome, mapped_backward, mapped_forward
from dcp_pipeline.serialization.base import Serialization
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["Chosen", "Sources", "choose"]

Opened = tuple[Directory, Manifest]

_STEP_ELEMENTS = 1 << 18
"""That are averaged at a time, in float32 or float64, twice."""


@dataclass(frozen=True)
class Chosen:
    """What is made of the keys of a source.

    Attributes:
        outcome: of the rules.
        paths, kinds: of each key that they have made.
        plain: tensors that stay as they are stored.
        nbytes: bytes of the elements that are going to be written.
    """

    outcome: Outcome
    paths: dict[str, Path]
    kinds: dict[str, Kind]
    plain: list[str]
    nbytes: int


def choose(
    manifest: Manifest,
    rules: Sequence[Rule],
    reverse: bool,
    only: Sequence[str],
    drop: Sequence[str],
    dtype: str | None,
) -> Chosen:
    """Pass the keys of a checkpoint through the rules.

    Args:
        reverse: from the side of the checkpoint to that of the state.
        only, drop: globs on the source's keys: which take part, and which of these do not.
        dtype: what floating-point tensors of 2 bytes or more an element become.

    Raises:
        RuleError: keys that no rule takes, collisions, shapes that do not fit; all in one error.
        ConfigError: nothing is left, or a glob matches nothing.
    """
    stored = stored_tensors(manifest)
    _check_globs(list(stored), only, drop)
    found = {
        name: tensor
        for name, tensor in stored.items()
        if (not only or matches(name, only)) and not matches(name, drop)
    }
    if not found and stored:
        raise ConfigError("no key of the source is left: look at --only and --drop")
    outcome = mapped_backward(rules, found) if reverse else mapped_forward(rules, found)
    outcome.raise_problems("the source")
    _check_whole(outcome)
    if dtype is not None:
        for name, tensor in outcome.tensors.items():
            if tensor is not None and _is_float(tensor.dtype):
                outcome.tensors[name] = replace(tensor, dtype=dtype)
    numbers = {name: key for key, name in enumerate(manifest.names)}
    specs = manifest.table.keys
    paths, kinds, plain, nbytes = dict[str, Path](), dict[str, Kind](), list[str](), 0
    for name, tensor in outcome.tensors.items():
        sources = outcome.origins[name].sources
        spec = specs[numbers[sources[0]]] if len(sources) == 1 else None
        paths[name] = spec.path if spec is not None and sources[0] == name else (name,)
        kinds[name] = spec.kind if spec is not None else Kind.TENSOR
        if tensor is None:
            continue
        count = 1
        for extent in tensor.shape:
            count *= extent
        nbytes += count * DTYPES[tensor.dtype].itemsize
        if len(tensor.sources) == 1:
            held = specs[numbers[tensor.sources[0]]]
            assert held.dtype is not None
            if tensor.is_copy_of(tensor.sources[0], held.dtype, held.shape):
                plain.append(name)
    return Chosen(outcome, paths, kinds, plain, nbytes)


def _is_float(dtype: str) -> bool:
    return DTYPES[dtype].is_floating_point and DTYPES[dtype].itemsize > 1


def _check_globs(names: list[str], only: Sequence[str], drop: Sequence[str]) -> None:
    unused = [glob for glob in (*only, *drop) if not any(matches(name, [glob]) for name in names)]
    if unused:
        raise ConfigError(
            f"no key of the source matches {list_some(map(repr, unused))}; it has, for instance,"
            f" {list_some(map(repr, names), 5)}"
        )


def _check_whole(outcome: Outcome) -> None:
    """Every element of the target has to come from somewhere."""
    holes = []
    for name, tensor in outcome.tensors.items():
        if tensor is not None:
            wanted = 1
            for extent in tensor.shape:
                wanted *= extent
            found = sum(part.elements for part in tensor.parts)
            if found != wanted:
                holes.append(f"{name!r}: {found} of its {wanted} elements are filled")
    if holes:
        raise RuleError.of(holes, "the source")


class Sources:
    """One checkpoint, or the average of several.

    Args:
        opened: the checkpoints.
        chosen: what is made of the keys of each, alike.
        weights: of each in the average; ``None`` for one checkpoint as it is.
        check: called between two steps; may raise to stop.

    Raises:
        LoadMismatchError: they have not the same keys, shapes and dtypes.
    """

    def __init__(
        self,
        opened: Sequence[Opened],
        chosen: Sequence[Chosen],
        weights: Sequence[float] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._opened, self._chosen, self._weights = opened, chosen, weights
        _check_alike(opened, chosen)
        self._doubles = set() if weights is None else _doubles(opened, chosen)
        self._stack = ExitStack()
        self.readers = [
            self._stack.enter_context(SourceReader(directory, manifest, one.outcome.tensors, check))
            for (directory, manifest), one in zip(opened, chosen, strict=True)
        ]

    def __enter__(self) -> Sources:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def fill(self, name: str, offsets: tuple[int, ...], memory: torch.Tensor) -> None:
        """Make the box of a tensor that starts at ``offsets`` and has the memory's shape."""
        if self._weights is None or not memory.dtype.is_floating_point:
            # What is counted or chosen has no average: the first has it.
            self.readers[0].fill(name, offsets, memory)
        else:
            self._fill_average(name, offsets, memory, self._weights)

    def _fill_average(
        self,
        name: str,
        offsets: tuple[int, ...],
        memory: torch.Tensor,
        weights: Sequence[float],
    ) -> None:
        """In small steps, for it takes several times their memory."""
        if memory.numel() > _STEP_ELEMENTS:
            axis = next(axis for axis, extent in enumerate(memory.shape) if extent > 1)
            extent = memory.shape[axis]
            step = max(1, extent * _STEP_ELEMENTS // memory.numel())
            for start in range(0, extent, step):
                begin = (*offsets[:axis], offsets[axis] + start, *offsets[axis + 1 :])
                part = memory.narrow(axis, start, min(step, extent - start))
                self._fill_average(name, begin, part, weights)
            return
        wide = torch.float64 if name in self._doubles else torch.float32
        total = torch.zeros(memory.shape, dtype=wide, device="cpu")
        one = torch.empty(memory.shape, dtype=wide, device="cpu")
        for reader, weight in zip(self.readers, weights, strict=True):
            reader.fill(name, offsets, one)
            total.add_(one, alpha=weight)
        self.readers[0].note_casts(name, cast_into(memory, total))

    def value(self, name: str, target: Serialization) -> tuple[bytes, int]:
        """A value as the target stores it, and the digest of its meaning; the first checkpoint's.

        What cannot be read here, and need not be to be passed on, has the digest 0.
        """
        manifest = self._opened[0][1]
        (stored,) = self._chosen[0].outcome.origins[name].sources
        data = self.readers[0].value(stored)
        source: Serialization = model_of("serialization", manifest.serialization)(
            kind=manifest.serialization
        ).build()
        if manifest.serialization == target.kind:
            try:
                return data, value_digest(source.decode_value(data))
            except CheckpointError:
                return data, 0
        value = source.decode_value(data)
        return target.encode_value(value), value_digest(value)


def _doubles(opened: Sequence[Opened], chosen: Sequence[Chosen]) -> set[str]:
    """The tensors of which anything is stored in float64, or is going to be."""
    found = set()
    for (_, manifest), one in zip(opened, chosen, strict=True):
        wide = {
            name
            for name, spec in zip(manifest.names, manifest.table.keys, strict=True)
            if spec.dtype == "float64"
        }
        for name, tensor in one.outcome.tensors.items():
            if tensor is not None and (
                tensor.dtype == "float64" or wide.intersection(tensor.sources)
            ):
                found.add(name)
    return found


def _check_alike(opened: Sequence[Opened], chosen: Sequence[Chosen]) -> None:
    def kinds(one: Chosen) -> dict[str, Any]:
        return {
            name: None if tensor is None else (tensor.dtype, tensor.shape)
            for name, tensor in one.outcome.tensors.items()
        }

    first = kinds(chosen[0])
    for (directory, _), one in zip(opened[1:], chosen[1:], strict=True):
        other = kinds(one)
        missing = [name for name in first if name not in other]
        unexpected = [name for name in other if name not in first]
        different = [name for name in first if name in other and other[name] != first[name]]
        if missing or unexpected or different:
            raise LoadMismatchError(
                f"{directory.location} cannot be averaged with {opened[0][0].location}:"
                f" it lacks {list_some(missing, 5) or 'nothing'}, has"
                f" {list_some(unexpected, 5) or 'nothing'} besides, and"
                f" {list_some(different, 5) or 'nothing'} of another shape or dtype",
                missing,
                unexpected,
            )
