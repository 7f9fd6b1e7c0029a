"""Draws a graph: as text for a terminal, as Mermaid for a document, as SVG for everything else."""

from __future__ import annotations

from typing import Literal, get_args

from dcp_pipeline.core.errors import GraphError
from dcp_pipeline.graph.edges import (
    edges_of,
    single_use_inputs,
    unlinked_inputs,
    unused_outputs,
    where,
)
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node, Where
from dcp_pipeline.graph.svg import draw_svg

__all__ = ["Style", "draw"]

Style = Literal["text", "mermaid", "svg"]


def draw(graph: Graph, style: Style = "text") -> str:
    """A picture of ``graph``, ending in a line break.

    >>> from dcp_pipeline.graph.node import Node
    >>> read = Node("read", print, ("path",), ("data",))
    >>> agree = Node("agree", print, ("data",), ("plan",), coordinates=True)
    >>> print(draw(Graph("small", [read, agree], ["path"])), end="")
    small: path in, plan out
    <BLANKLINE>
      ╭─○ read   every rank          path → data
      ╰─● agree  all ranks together  data → plan
    <BLANKLINE>
    ● the ranks exchange something; runs on a rank that has failed, too

    Args:
        graph: what to draw.
        style: ``text`` has one line per node, ``mermaid`` is a flowchart, ``svg`` a whole file.

    Raises:
        GraphError: there is no such style.
    """
    if style == "text":
        return _text(graph)
    if style == "mermaid":
        return _mermaid(graph)
    if style == "svg":
        return draw_svg(graph)
    raise GraphError(f"found the style {style!r}; allowed: {', '.join(get_args(Style))}")


def _text(graph: Graph) -> str:
    results = [value for node in graph for value in unused_outputs(graph, node)]
    lines = [f"{graph.name}: {_list(graph.inputs)} in, {_list(results)} out", ""]
    names = _column([node.name for node in graph])
    places = _column([where(node) for node in graph])
    takes = _column([_list(node.inputs) for node in graph])
    for position, node in enumerate(graph):
        rail = _rail(position, len(graph.nodes))
        line = f"{names[position]}  {places[position]}  {takes[position]} → {_list(node.outputs)}"
        lines.append(f"  {rail}{_symbol(node)} {line}")
    lines.append("")
    lines += [text for wanted, text in _legend(graph) if wanted]
    return "\n".join(lines).rstrip() + "\n"


def _legend(graph: Graph) -> list[tuple[bool, str]]:
    return [
        (
            any(node.coordinates for node in graph),
            "● the ranks exchange something; runs on a rank that has failed, too",
        ),
        (
            any(node.where is Where.COORDINATOR for node in graph),
            "◆ on the coordinator alone; elsewhere its values are None",
        ),
    ]


def _list(values: tuple[str, ...] | list[str]) -> str:
    return ", ".join(map(_one_line, values)) or "nothing"


def _column(texts: list[str]) -> list[str]:
    plain = [_one_line(text) for text in texts]
    width = max(map(len, plain), default=0)
    return [text.ljust(width) for text in plain]


def _rail(position: int, count: int) -> str:
    if count == 1:
        return "──"
    return "╭─" if position == 0 else "╰─" if position == count - 1 else "├─"


def _symbol(node: Node) -> str:
    if node.coordinates:
        return "●"
    return "◆" if node.where is Where.COORDINATOR else "○"


def _mermaid(graph: Graph) -> str:
    ids = {node.name: f"n{position}" for position, node in enumerate(graph)}
    inputs = {value: f"in{position}" for position, value in enumerate(single_use_inputs(graph))}
    lines = ["flowchart TD"]
    lines += [f'    {key}(["{_escape(value)}"]):::value' for value, key in inputs.items()]
    for node in graph:
        lines.append(f'    {ids[node.name]}["{_label(graph, node)}"]:::{_kind(node)}')
    merged: dict[tuple[str, str], list[str]] = {}
    for edge in edges_of(graph):
        source = inputs[edge.value] if edge.source is None else ids[edge.source]
        merged.setdefault((source, ids[edge.target]), []).append(edge.value)
    for (source, target), values in merged.items():
        label = "" if source.startswith("in") else f'|"{_escape(", ".join(values))}"|'
        lines.append(f"    {source} -->{label} {target}")
    for node in graph:
        for value in unused_outputs(graph, node):
            out = f"out{ids[node.name]}_{node.outputs.index(value)}"
            lines.append(f'    {ids[node.name]} --> {out}(["{_escape(value)}"]):::value')
    lines += [
        "    classDef local fill:#eef2f7,stroke:#64748b,color:#0f172a",
        "    classDef together fill:#fde68a,stroke:#b45309,color:#451a03,stroke-width:2px",
        "    classDef coordinator fill:#e0e7ff,stroke:#4338ca,color:#1e1b4b,stroke-dasharray:5 3",
        "    classDef value fill:#ffffff,stroke:#94a3b8,color:#334155",
    ]
    return "\n".join(lines) + "\n"


def _kind(node: Node) -> str:
    if node.coordinates:
        return "together"
    return "coordinator" if node.where is Where.COORDINATOR else "local"


def _label(graph: Graph, node: Node) -> str:
    parts = [f"<b>{_escape(node.name)}</b>", _escape(where(node))]
    shared = unlinked_inputs(graph, node)
    if shared:
        parts.append(f"<i>with {_escape(', '.join(shared))}</i>")
    return "<br/>".join(parts)


_ENTITIES = {ord(c): f"#{ord(c)};" for c in '#"`<>&|[](){}\\;'}


def _escape(text: str) -> str:
    """Text that stays text inside a quoted label of Mermaid."""
    return _one_line(text).translate(_ENTITIES)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
