"""A graph as SVG: nodes from top to bottom, and beside them a lane for every value that skips one.

Nothing but text is made here: no fonts are measured and no program is run. The fonts are
monospaced, so that the width of a text is known from its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from dcp_pipeline.graph.edges import Edge, edges_of, unlinked_inputs, unused_outputs, where
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node, Where

__all__ = ["draw_svg"]

_MARGIN = 28
_TITLE = 44
_GAP = 46
_LINE = 18
_PADDING = 12
_NAME_CHAR, _SMALL_CHAR = 9.1, 7.3
_STYLE = """
  svg { color-scheme: light dark; }
  text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #0f172a; }
  .page { fill: #ffffff; }
  .title { font-size: 19px; font-weight: 700; }
  .name { font-size: 15px; font-weight: 700; }
  .small, .label { font-size: 12px; fill: #475569; }
  .node rect { fill: #f1f5f9; stroke: #64748b; stroke-width: 1.2; }
  .node.together rect { fill: #fde68a; stroke: #b45309; stroke-width: 2; }
  .node.together text { fill: #451a03; }
  .node.coordinator rect { fill: #e0e7ff; stroke: #4338ca; stroke-dasharray: 6 3; }
  .node.value rect { fill: #ffffff; stroke: #94a3b8; }
  .edge { fill: none; stroke: #64748b; stroke-width: 1.4; }
  .arrow { fill: #64748b; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e2e8f0; }
    .page { fill: #0f172a; }
    .small, .label { fill: #94a3b8; }
    .node rect { fill: #1e293b; stroke: #64748b; }
    .node.together rect { fill: #78350f; stroke: #f59e0b; }
    .node.together text { fill: #fef3c7; }
    .node.coordinator rect { fill: #312e81; stroke: #818cf8; }
    .node.value rect { fill: #0f172a; stroke: #475569; }
    .edge { stroke: #94a3b8; }
    .arrow { fill: #94a3b8; }
  }
"""


@dataclass(frozen=True, slots=True)
class _Box:
    """A node, or an input or output of the graph, in its place.

    Attributes:
        name: of the node or the value.
        kind: its class in the style sheet.
        lines: what stands below the name.
        top, height: in pixels.
    """

    name: str
    kind: str
    lines: tuple[str, ...]
    top: float = 0
    height: float = 0


def draw_svg(graph: Graph) -> str:
    """``graph`` as a whole SVG file."""
    edges = edges_of(graph)
    boxes = _placed(list(_boxes(graph, edges)))
    width = max(_text_width(box) for box in boxes) + 2 * _PADDING
    lanes = _Lanes(boxes, edges, _MARGIN + width)
    height = boxes[-1].top + boxes[-1].height + _MARGIN
    title = f"{graph.name} graph"
    total = max(lanes.right, _MARGIN + len(title) * 12) + _MARGIN
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total:g} {height:g}"'
        f' width="{total:g}" height="{height:g}" role="img">',
        f"<title>{_plain(title)}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8"'
        ' markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
        '<path class="arrow" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        '<rect class="page" width="100%" height="100%"/>',
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 8}">{_plain(title)}</text>',
        *lanes.draw(),
        *(_draw_box(box, width) for box in boxes),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _boxes(graph: Graph, edges: Sequence[Edge]) -> Iterator[_Box]:
    yield from (_Box(edge.value, "value", ()) for edge in edges if edge.source is None)
    for node in graph:
        lines = [where(node)]
        if shared := unlinked_inputs(graph, node):
            lines.append("with " + ", ".join(shared))
        if results := unused_outputs(graph, node):
            lines.append("gives " + ", ".join(results))
        yield _Box(node.name, _kind(node), tuple(lines))


def _kind(node: Node) -> str:
    if node.coordinates:
        return "together"
    return "coordinator" if node.where is Where.COORDINATOR else "local"


def _placed(boxes: list[_Box]) -> list[_Box]:
    placed, top = [], float(_MARGIN + _TITLE)
    for box in boxes:
        height = 2 * _PADDING + _LINE * (1 + len(box.lines)) - 4
        placed.append(_Box(box.name, box.kind, box.lines, top, height))
        top += height + _GAP
    return placed or [_Box("nothing", "value", (), top, 2 * _PADDING + _LINE)]


def _text_width(box: _Box) -> float:
    return max(len(box.name) * _NAME_CHAR, *(len(line) * _SMALL_CHAR for line in ("", *box.lines)))


def _draw_box(box: _Box, width: float) -> str:
    center = _MARGIN + width / 2
    radius = box.height / 2 if box.kind == "value" else 8
    texts = [_centered("name", box.name, center, box.top + _PADDING + 13)]
    for number, line in enumerate(box.lines, 1):
        texts.append(_centered("small", line, center, box.top + _PADDING + 13 + number * _LINE))
    return (
        f'<g class="node {box.kind}" data-name={_attribute(box.name)}>'
        f'<rect x="{_MARGIN}" y="{box.top:g}" width="{width:g}" height="{box.height:g}"'
        f' rx="{radius:g}"/>' + "".join(texts) + "</g>"
    )


def _centered(kind: str, text: str, x: float, y: float) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{_plain(text)}</text>'


class _Lanes:
    """Arrows: straight down to the next node, or through a lane at the right of the nodes.

    Args:
        boxes: in their places, from top to bottom.
        edges: what to draw.
        side: x of the right side of the nodes.
    """

    def __init__(self, boxes: Sequence[_Box], edges: Sequence[Edge], side: float) -> None:
        self._boxes = boxes
        self._side = side
        inputs = [edge.value for edge in edges if edge.source is None]
        place = {box.name: number + len(inputs) for number, box in enumerate(boxes[len(inputs) :])}
        self._ends = {
            edge: (
                inputs.index(edge.value) if edge.source is None else place[edge.source],
                place[edge.target],
            )
            for edge in edges
        }
        self._straight = [edge for edge, (start, end) in self._ends.items() if end - start == 1]
        self._skipping = [edge for edge in edges if edge not in set(self._straight)]
        self._lane = self._assign()
        labels = [len(edge.value) * _SMALL_CHAR for edge in self._skipping]
        self._step = max(labels, default=0) + 20
        straight = [len(label) * _SMALL_CHAR for label in self._joined().values()]
        label_end = _MARGIN + (side - _MARGIN) / 2 + 10 + max(straight, default=0)
        self._first = max(side + 26, label_end + 10)
        lanes = self._first + self._step * (max(self._lane.values(), default=-1) + 1)
        self.right = max(side, lanes, label_end)

    def _joined(self) -> dict[int, str]:
        """What is handed straight down, by the number of the box that it comes from."""
        labels: dict[int, list[str]] = {}
        for edge in self._straight:
            labels.setdefault(self._ends[edge][0], []).append(edge.value)
        return {start: ", ".join(values) for start, values in labels.items()}

    def _assign(self) -> dict[tuple[int, str], int]:
        """A lane per value, the innermost that is free over all of its way."""
        spans: dict[tuple[int, str], int] = {}
        for edge in self._skipping:
            start, end = self._ends[edge]
            spans[start, edge.value] = max(end, spans.get((start, edge.value), 0))
        lanes: dict[tuple[int, str], int] = {}
        taken: list[list[tuple[int, int]]] = []
        for (start, value), end in sorted(spans.items(), key=lambda span: span[1] - span[0][0]):
            free = (
                number
                for number, others in enumerate(taken)
                if all(end < low or high < start for low, high in others)
            )
            number = next(free, len(taken))
            if number == len(taken):
                taken.append([])
            taken[number].append((start, end))
            lanes[start, value] = number
        return lanes

    def draw(self) -> Iterator[str]:
        """The arrows and their labels."""
        middle = _MARGIN + (self._side - _MARGIN) / 2
        for edge in self._straight:
            start, end = self._ends[edge]
            bottom = self._boxes[start].top + self._boxes[start].height
            yield _edge(edge, f"M{middle:g},{bottom:g} V{self._boxes[end].top - 2:g}")
        for start, label in self._joined().items():
            y = self._boxes[start].top + self._boxes[start].height + _GAP / 2 + 4
            if self._boxes[start].name != label:
                yield f'<text class="label" x="{middle + 9:g}" y="{y:g}">{_plain(label)}</text>'
        for edge in self._skipping:
            start, end = self._ends[edge]
            x = self._first + self._step * self._lane[start, edge.value]
            leave, arrive = self._port(start, edge.value, True), self._port(end, edge.value, False)
            yield _edge(
                edge,
                f"M{self._side:g},{leave:g} H{x - 8:g} Q{x:g},{leave:g} {x:g},{leave + 8:g}"
                f" V{arrive - 8:g} Q{x:g},{arrive:g} {x - 8:g},{arrive:g} H{self._side + 2:g}",
            )
        for (start, value), lane in self._lane.items():
            x = self._first + self._step * lane + 7
            y = self._port(start, value, True) + 26
            yield f'<text class="label" x="{x:g}" y="{y:g}">{_plain(value)}</text>'

    def _port(self, box: int, value: str, leaves: bool) -> float:
        """Where a value leaves or enters the right side of a box; inputs above outputs."""
        coming = [(e.value, False) for e in self._skipping if self._ends[e][1] == box]
        going = [(v, True) for start, v in self._lane if start == box]
        ports = [*coming, *going]
        place = ports.index((value, leaves)) + 1
        return self._boxes[box].top + self._boxes[box].height * place / (len(ports) + 1)


def _edge(edge: Edge, path: str) -> str:
    return (
        f'<path class="edge" data-from={_attribute(edge.source or "")}'
        f" data-to={_attribute(edge.target)} data-value={_attribute(edge.value)}"
        f' d="{path}" marker-end="url(#arrow)"/>'
    )


def _legal(text: str) -> str:
    """``text`` without what XML cannot hold, such as most control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _plain(text: str) -> str:
    return escape(_legal(text))


def _attribute(text: str) -> str:
    return quoteattr(_legal(text))
