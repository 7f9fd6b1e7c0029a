"""Converts checkpoints: from any layout to any other, slab by slab, on any number of ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from typing import Any

import torch

from dcp_pipeline.config.compose import load_mapping
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import parse_bytes
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.graph.trace import Trace
from dcp_pipeline.layout.torch_file import TorchFileLayout
from dcp_pipeline.pipelines.arguments import as_text
from dcp_pipeline.pipelines.complete import complete
from dcp_pipeline.pipelines.convert import convert_graph, streamed_entries
from dcp_pipeline.pipelines.job import SaveJob
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.resumption import lasting_id
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.convert_check import check_target
from dcp_pipeline.tools.convert_source import Chosen, Sources, choose
from dcp_pipeline.tools.sources import open_on_ranks
from dcp_pipeline.types.dtypes import DTYPES

__all__ = ["Conversion", "PlannedKey", "convert"]

Progress = Callable[[int, int], None]
"""``(bytes of elements written so far by this rank, bytes that it writes altogether)``."""

_TARGETS = {
    "dcp": {"layout": "dcp"},
    "huggingface": {"layout": "huggingface", "serialization": "safetensors"},
    "mega": {"layout": "mega", "serialization": "mega"},
    "torch_save": {"serialization": "torch_save"},
}
_FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
_SPARE_BYTES = 48 << 20
"""Of a thread, for what is read and written at a time."""


@dataclass(frozen=True, slots=True)
class PlannedKey:
    """A key of the target.

    Attributes:
        name: of it.
        dtype: ``None`` for a value.
        shape: of the whole tensor.
        sources: keys of the source that it is made of.
        rules: that have made it, in order.
    """

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """What a conversion has done.

    Attributes:
        source, target: where they are.
        source_kind, target_kind: their layouts.
        keys: of the target.
        dropped: keys of the source that the rules have taken out.
        nbytes: of the elements that were written by all ranks.
        seconds: that it took.
        fingerprint: of the target's values; ``None`` where nothing was written.
        is_checked: whether the target was read again, and compared with what the source gave.
        casts: elements that did not fit their new dtype, by key; this rank's share.
    """

    source: tuple[str, ...]
    target: str
    source_kind: str
    target_kind: str
    keys: tuple[PlannedKey, ...]
    dropped: tuple[str, ...]
    nbytes: int
    seconds: float = 0.0
    fingerprint: str | None = None
    is_checked: bool = False
    casts: Mapping[str, int] = field(default_factory=dict)


def convert(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    config: PipelineConfig | Mapping[str, Any] | None = None,
    source_kind: str | None = None,
    source_options: Mapping[str, Any] | None = None,
    reverse: bool = False,
    only: Sequence[str] = (),
    drop: Sequence[str] = (),
    dtype: str | None = None,
    max_shard_size: int | str | None = None,
    weights: Sequence[float] | None = None,
    memory: int | str = "2GiB",
    check: bool = True,
    resume: bool = True,
    plan_only: bool = False,
    progress: Progress | None = None,
    process_group: Any = None,
) -> Conversion:
    """Write the checkpoint ``source`` as another one, ``target``; all ranks share the work.

    The target exists once all of it is written, in one atomic step.

    Args:
        source: a checkpoint of any kind that can be recognised, or several to be averaged.
        target: a directory; what is in it is replaced by the rules of its layout.
        to: ``dcp``, ``huggingface`` or ``mega``, with the serialization that goes with it; instead
            of ``config``, or over it. ``torch_save`` is one file for ``torch.load``, named by
            ``target``: tensors and values by name, written by one rank.
        config: of the target; its ``transforms`` are the rules, from the source to the target.
        source_kind: of the source, where it is not to be recognised.
        source_options: of the source's layout, such as ``{"dequantize": "bfloat16"}``.
        reverse: apply the rules backward.
        only, drop: globs on the source's keys.
        dtype: what floating-point tensors become.
        max_shard_size: bytes of a file, for layouts that have files of a size.
        weights: of the sources in their average; alike by default. Averages are taken in float32,
            of float64 ones in float64, and become ``dtype`` in the end; what is no floating-point
            tensor is the first source's.
        memory: bytes that tensors may take on this rank, beside what the process has.
        check: read the target again at the end, and compare every tensor's fingerprint with that
            of what the source gave, and with the source's own where one is recorded.
        resume: leave what is finished where a conversion is broken off, and go on from there when
            it is tried again with the same arguments and ranks; without, and with a single file,
            it is removed.
        plan_only: say what would be written, and write nothing.
        progress: called while this rank writes.

    Raises:
        RuleError: keys that no rule takes, or that rules cannot make; all in one error.
        CheckpointException: nothing was committed, on any rank.
        ChecksumError: the target does not hold what was written.

    Example:
        >>> import tempfile, torch, dcp_pipeline as dcp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp.save({"w": torch.arange(4)}, checkpoint_id=f"{folder}/a")
        ...     done = convert(f"{folder}/a", f"{folder}/b", to="huggingface")
        ...     done.keys[0].name, done.nbytes, done.is_checked
        ('w', 32, True)
    """
    started = time.perf_counter()
    sources = [as_text(one) for one in _listed(source)]
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"found the dtype {dtype!r}; allowed: {', '.join(_FLOATS)}", "dtype")
    checked = _config(to, config, max_shard_size)
    shares = _weights(sources, weights)
    folder, name = _file_of(as_text(target)) if to == "torch_save" else (as_text(target), "")
    parts = Parts.build(checked)
    if name:
        parts = replace(parts, layout=TorchFileLayout(name))
    try:
        coordinator = parts.coordination.coordinator(process_group)
        options = source_options or {}
        opened = [open_on_ranks(one, source_kind, options, coordinator) for one in sources]
        chosen = [
            choose(manifest, parts.rules, reverse, only, drop, dtype) for _, manifest in opened
        ]
        directory = parts.storage.open(folder)
        planned = Conversion(
            tuple(place.location for place, _ in opened),
            _target_of(directory, parts),
            opened[0][1].layout,
            parts.layout.kind,
            _keys(chosen[0]),
            tuple(chosen[0].outcome.dropped),
            chosen[0].nbytes,
        )
        if plan_only:
            return planned
        room = _slab_bytes(memory, parts.storage.thread_count)
        serialization, slab_bytes = parts.serialization.within(room)
        if shares is not None:
            slab_bytes //= 2  # for the sum, and what is added to it
        parts = replace(parts, serialization=serialization)
        job = SaveJob(parts, coordinator, directory, {"converted_from": list(sources)})
        if resume and not name:
            job.lasting_id = _lasting_id(planned, opened, checked, coordinator, slab_bytes, shares)
        with Sources(opened, chosen, shares, job.check_peers) as reading:
            meter = _Meter(reading.fill, progress, chosen[0].nbytes // coordinator.world_size)
            entries = partial(
                streamed_entries,
                chosen[0].outcome.tensors,
                chosen[0].paths,
                chosen[0].kinds,
                meter.fill,
                partial(reading.value, target=parts.serialization),
                slab_bytes,
                chosen[0].plain,
            )
            trace = Trace("convert", coordinator.rank)
            saved = complete(convert_graph(parts), {"source": entries, "job": job}, job, trace)
            casts = dict(reading.readers[0].casts)
        written = saved.manifest
        if check:
            recorded = None if shares is not None or dtype is not None else opened[0][1]
            check_target(
                directory.location, written, parts, coordinator, chosen[0], recorded, slab_bytes
            )
        return Conversion(
            planned.source,
            planned.target,
            planned.source_kind,
            planned.target_kind,
            planned.keys,
            planned.dropped,
            planned.nbytes,
            time.perf_counter() - started,
            None if written.fingerprint is None else str(written.fingerprint),
            check,
            casts,
        )
    finally:
        parts.close()


def _file_of(target: str) -> tuple[str, str]:
    """The directory and the name of a target that is one file."""
    folder, _, name = target.rpartition("/")
    if name in ("", ".", "..") or os.path.isdir(target):
        raise ConfigError(
            f"expected the path of a file, such as model.pt, found {target!r}", "target"
        )
    return folder or ("/" if target.startswith("/") else "."), name


def _target_of(directory: Directory, parts: Parts) -> str:
    if isinstance(parts.layout, TorchFileLayout):
        return f"{directory.location}/{parts.layout.name}"
    return directory.location


def _listed(source: Any) -> list[Any]:
    return [source] if isinstance(source, str | os.PathLike) else list(source)


def _config(
    to: str | None, config: PipelineConfig | Mapping[str, Any] | None, max_shard_size: Any
) -> PipelineConfig:
    """The target's config, as a conversion needs it."""
    given = load_mapping(config or {}).to_dict()
    if to is not None:
        if to not in _TARGETS:
            raise ConfigError(f"found the target {to!r}; allowed: {', '.join(_TARGETS)}", "to")
        for group, kind in _TARGETS[to].items():
            if given[group]["kind"] != kind:
                given[group] = {"kind": kind}
    if max_shard_size is not None:
        given["layout"]["max_shard_size"] = max_shard_size
    # What all ranks read of one source need not be compared, and would be read for it.
    given["planner"] = {"kind": "default", "check_replicas": False}
    if given["layout"]["kind"] == "mega":
        # A tensor lies in one shard, as other readers want it.
        given["planner"]["split_bytes"] = 1 << 60
    given["stager"] = {"kind": "inplace"}
    given["background"] = {"kind": "thread"}
    given["fingerprint"] = True
    return load_mapping(given)


def _weights(sources: list[str], weights: Sequence[float] | None) -> list[float] | None:
    if not sources:
        raise ConfigError("there is no source")
    if weights is None:
        return None if len(sources) == 1 else [1.0 / len(sources)] * len(sources)
    if len(weights) != len(sources):
        raise ConfigError(f"{len(weights)} weights are given for {len(sources)} sources", "weights")
    if not all(map(isfinite, weights)):
        raise ConfigError(f"found the weights {list(weights)}; expected finite ones", "weights")
    return [float(weight) for weight in weights]


def _keys(chosen: Chosen) -> tuple[PlannedKey, ...]:
    return tuple(
        PlannedKey(
            name,
            None if tensor is None else tensor.dtype,
            () if tensor is None else tensor.shape,
            chosen.outcome.origins[name].sources,
            tuple(step.rule for step in chosen.outcome.origins[name].steps),
        )
        for name, tensor in chosen.outcome.tensors.items()
    )


def _lasting_id(
    planned: Conversion,
    opened: Sequence[tuple[Directory, Manifest]],
    config: PipelineConfig,
    coordinator: Coordinator,
    *others: object,
) -> str:
    """The same for the same conversion of the same bytes by as many ranks."""
    contents = [
        [manifest.save_id, manifest.names, [_token(directory, e.name) for e in manifest.files]]
        for directory, manifest in opened
    ]
    return lasting_id(
        planned.source, planned.target, planned.keys, contents, config.digest(),
        coordinator.world_size, *others,
    )  # fmt: skip


def _token(directory: Directory, name: str) -> str | None:
    # The files of foreign checkpoints may lie in folders.
    return directory.token(name) if "/" not in name else f"{name}-{directory.size(name)}"


def _slab_bytes(memory: int | str, threads: int) -> int:
    try:
        budget = parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"memory: {error}, found {memory!r}", "memory") from error
    if not isinstance(budget, int) or budget < (64 << 20) * threads:
        raise ConfigError(
            f"memory is at least 64MiB for each of the {threads} threads, found {memory!r}",
            "memory",
        )
    return budget // threads - _SPARE_BYTES


class _Meter:
    """Counts what is made, and tells of it."""

    def __init__(
        self,
        fill: Callable[[str, tuple[int, ...], torch.Tensor], None],
        progress: Progress | None,
        total: int,
    ) -> None:
        self._fill, self._progress, self._total = fill, progress, total
        self._done = 0
        self._lock = threading.Lock()

    def fill(self, name: str, offsets: tuple[int, ...], memory: torch.Tensor) -> None:
        self._fill(name, offsets, memory)
        if self._progress is not None:
            with self._lock:
                self._done += memory.numel() * memory.element_size()
                self._progress(self._done, max(self._done, self._total))
