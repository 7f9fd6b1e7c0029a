"""The save, from the caller's state to a committed checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.layout.export import ExportLayout
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.steps import (
    collect,
    export_write,
    map_entries,
    save_agree,
    save_commit,
    save_plan,
    save_write,
    untie,
)
from dcp_pipeline.pipelines.values import Receipt

__all__ = ["save_graph", "write_of"]


def save_graph(parts: Parts, extra: Sequence[Node] = ()) -> Graph:
    """The graph that every rank runs to save; ``extra`` are a user's further nodes."""
    graph = Graph(
        "save",
        [
            # Expand Stateful objects, name every leaf, refuse what cannot be stored.
            Node("collect", collect.collect_entries, ("state", "job"), ("entries",)),
            # Take the snapshot. Nothing behind this reads the caller's memory if it is one.
            Node("stage", parts.stager.stage, ("entries",), ("staged",)),
            # The chunks that this rank holds.
            Node("plan", save_plan.local_plan, ("staged", "job"), ("local_plan",)),
            # All ranks: one checkpoint, one config, no replicas, exact tiling, even shares.
            Node(
                "agree", save_agree.agree, ("local_plan", "job"), ("share",), coordinates=True
            ),
            # Stream this rank's share to storage, hashing every block.
            Node("write", write_of(parts), ("staged", "share", "job"), ("receipt",)),
            # All ranks: every receipt fits the plan; then the checkpoint starts to exist.
            Node(
                "commit", save_commit.commit, ("share", "receipt", "job"), ("manifest",),
                coordinates=True,
            ),
        ],
        inputs=("state", "job"),
    )  # fmt: skip
    if parts.rules:
        # Names, shapes and dtypes as the checkpoint is to have them; views, nothing is copied.
        mapping = Node("map", map_entries.map_entries, ("entries", "job"), ("entries",))
        graph = graph.through("entries", mapping)
    if isinstance(parts.layout, ExportLayout) and parts.layout.writes_ties:
        graph = graph.through("staged", Node("untie", untie.untie, ("staged",), ("staged",)))
    return graph.adding(*extra)


def write_of(parts: Parts) -> Callable[..., Receipt]:
    layout = parts.layout
    shares_files = isinstance(layout, ExportLayout) and layout.shares_files
    return export_write.write_ranges if shares_files else save_write.write
