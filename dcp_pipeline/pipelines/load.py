"""The load, from a committed checkpoint into the caller's state."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.steps import (
    load_agree,
    load_apply,
    load_plan,
    load_read,
    load_share,
)

__all__ = ["load_graph"]


def load_graph(parts: Parts, extra: Sequence[Node] = ()) -> Graph:
    """The graph that every rank runs to load; ``extra`` are a user's further nodes."""
    nodes = [
        # Expand Stateful objects and list the leaves that want a value.
        Node("collect", load_plan.collect_template, ("state", "job"), ("template",)),
        # All ranks: the coordinator reads the commit record and passes it on.
        Node("open", load_agree.open_checkpoint, ("job",), ("manifest",), coordinates=True),
        # What each leaf gets, and everything that does not fit. Nothing is touched yet.
        Node("plan", load_plan.plan, ("template", "manifest", "job"), ("match",)),
        # All ranks: one error with every difference on every rank, or none.
        Node(
            "agree", load_agree.agree, ("template", "match", "manifest", "job"), ("differences",),
            coordinates=True,
        ),
        # All ranks: what several of them need is read by one and passed on.
        Node(
            "share", load_share.share, ("match", "differences", "manifest", "job"), ("plan",),
            coordinates=True,
        ),
        # Read into the caller's tensors, verifying every block.
        Node("read", load_read.read, ("match", "plan", "manifest", "job"), ("fetched",)),
        # All ranks: everybody has everything, or everybody puts everything back.
        Node(
            "settle", load_apply.settle, ("template", "fetched", "job"), ("settled",),
            coordinates=True,
        ),
        # Put values in their places and let Stateful objects take their state; all or nobody.
        Node(
            "apply", load_apply.apply, ("template", "fetched", "settled", "job"), ("applied",),
            coordinates=True,
        ),
    ]  # fmt: skip
    if parts.config.rollback == "verify_first":
        # Read everything once for its digests alone, before the first tensor is touched.
        nodes.insert(
            5, Node("verify", load_read.verify, ("plan", "manifest", "job"), ("verified",))
        )
        nodes.insert(6, Node("settle verify", load_apply.settle_verify, ("verified", "job"), (),
                             coordinates=True))  # fmt: skip
    return Graph("load", nodes, inputs=("state", "job")).adding(*extra)
