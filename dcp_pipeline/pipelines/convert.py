"""The conversion, from one checkpoint on storage to another: a save whose state is never whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.table import Kind
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.layout.torch_file import TorchFileLayout
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.save import write_of
from dcp_pipeline.pipelines.steps import save_agree, save_commit, save_plan, torch_file, untie
from dcp_pipeline.types.entries import Entries, Entry, Piece
from dcp_pipeline.types.streamed import Fill, Streamed

__all__ = ["Buffers", "convert_graph", "streamed_entries"]

_STEP_BYTES = 8 << 20


def _staged(source: Callable[[], Entries]) -> Entries:
    return source()


# Every rank reads the values; what goes wrong with that is told to the others as well.
_STAGE = Node("stage", _staged, ("source",), ("staged",))


def convert_graph(parts: Parts) -> Graph:
    """The graph that every rank runs to convert; ``source`` makes the entries, which
    stand for what is read meanwhile."""
    if isinstance(parts.layout, TorchFileLayout):
        return _torch_file_graph()
    graph = Graph(
        "convert",
        [
            _STAGE,
            # The whole state, which every rank could write.
            Node("plan", save_plan.local_plan, ("staged", "job"), ("local_plan",)),
            # All ranks: even shares of it.
            Node(
                "agree", save_agree.agree, ("local_plan", "job"), ("share",), coordinates=True
            ),
            # Read, pass through the rules and write, slab by slab.
            Node("write", write_of(parts), ("staged", "share", "job"), ("receipt",)),
            # All ranks: then the target exists.
            Node(
                "commit", save_commit.commit, ("share", "receipt", "job"), ("manifest",),
                coordinates=True,
            ),
        ],
        inputs=("source", "job"),
    )  # fmt: skip
    if getattr(parts.layout, "writes_ties", False):
        graph = graph.through("staged", Node("untie", untie.untie, ("staged",), ("staged",)))
    return graph


def _torch_file_graph() -> Graph:
    """The graph for one file, which the coordinator writes: one stream, in one pass."""
    return Graph(
        "convert",
        [
            _STAGE,
            # The coordinator: read, pass through the rules and write, slab by slab.
            Node("write", torch_file.write_torch_file, ("staged", "job"), ("written",)),
            # All ranks: then the target exists.
            Node(
                "commit", torch_file.commit_torch_file, ("written", "job"), ("manifest",),
                coordinates=True,
            ),
        ],
        inputs=("source", "job"),
    )  # fmt: skip


class Buffers:
    """Memory that each writing thread keeps for its slabs: touched once, it stays fast."""

    def __init__(self) -> None:
        self._own = threading.local()

    def __call__(self, nbytes: int) -> torch.Tensor:
        """At least so many bytes, this thread's until it asks again."""
        held: torch.Tensor | None = getattr(self._own, "memory", None)
        if held is None or held.numel() < nbytes:
            self._own.memory = held = None
            held = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._own.memory = held
        return held


def streamed_entries(
    tensors: Mapping[str, Mapped | None],
    paths: Mapping[str, Path],
    kinds: Mapping[str, Kind],
    fill: Callable[[str, tuple[int, ...], torch.Tensor], None],
    value: Callable[[str], tuple[bytes, int]],
    slab_bytes: int,
    plain: Sequence[str] = (),
) -> Entries:
    """Entries whose elements are made when they are written.

    Args:
        tensors: by name; ``None`` for a value.
        paths, kinds: of each name.
        fill: makes a box of a tensor.
        value: the target's stored bytes of a value, and the digest of its meaning.
        slab_bytes: that are made at a time at most.
        plain: tensors that lie in the source as they will in the target: small steps are as good.
    """
    buffers, entries = Buffers(), Entries()
    places: dict[Mapped, int] = {}
    small = set(plain)
    for name, tensor in tensors.items():
        if tensor is None:
            payload, digest = value(name)
            entry = Entry(paths[name], kinds[name], payload=payload, digest=digest)
            entries.append(entry)
            continue
        alias = places.setdefault(tensor, len(entries)) if tensor.sources else len(entries)
        step = min(slab_bytes, _STEP_BYTES) if name in small else slab_bytes
        made: Fill = partial(fill, name)
        zeros = (0,) * len(tensor.shape)
        data: Any = Streamed(made, tensor.dtype, zeros, tensor.shape, step, buffers)
        pieces = (Piece(zeros, tensor.shape, cast(torch.Tensor, data)),)
        entries.append(
            Entry(
                paths[name],
                kinds[name],
                tensor.dtype,
                tensor.shape,
                pieces if 0 not in tensor.shape else (),
                alias=-1 if alias == len(entries) else alias,
            )
        )
    return entries
