"""What the drawings of a graph have in common: who hands which value to whom."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node

__all__ = ["Edge", "edges_of", "single_use_inputs", "unlinked_inputs", "unused_outputs", "where"]


@dataclass(frozen=True, slots=True)
class Edge:
    """A value on its way from the node that makes it to one that takes it.

    Attributes:
        value: its name.
        source: name of the node that makes it, ``None`` for an input of the graph.
        target: name of the node that takes it.
    """

    value: str
    source: str | None
    target: str


def edges_of(graph: Graph) -> list[Edge]:
    """Every value that is made by one node and taken by another, in the order of the nodes.

    Inputs of the graph are among them where one node alone takes them; what most nodes take would
    hide the rest of a drawing, and is named in the nodes instead (:func:`unlinked_inputs`).
    """
    single = single_use_inputs(graph)
    edges = []
    for node in graph:
        for value in node.inputs:
            maker = graph.maker_of(value)
            if maker is not None:
                edges.append(Edge(value, maker.name, node.name))
            elif value in single:
                edges.append(Edge(value, None, node.name))
    return edges


def single_use_inputs(graph: Graph) -> list[str]:
    """Inputs of the graph that exactly one node takes."""
    taken = [value for node in graph for value in node.inputs]
    return [value for value in graph.inputs if taken.count(value) == 1]


def unlinked_inputs(graph: Graph, node: Node) -> list[str]:
    """Inputs of the graph that ``node`` takes together with other nodes."""
    single = single_use_inputs(graph)
    return [v for v in node.inputs if graph.maker_of(v) is None and v not in single]


def unused_outputs(graph: Graph, node: Node) -> list[str]:
    """Values of ``node`` that no node takes: what comes out of the graph."""
    taken = {value for other in graph for value in other.inputs}
    return [value for value in node.outputs if value not in taken]


def where(node: Node) -> str:
    """Where a node runs, in words."""
    return "all ranks together" if node.coordinates else str(node.where)
