import re
from xml.etree import ElementTree

import pytest

from dcp_pipeline.core.errors import GraphError
from dcp_pipeline.graph.drawing import draw
from dcp_pipeline.graph.edges import edges_of
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node, Where
from dcp_pipeline.pipeline import Pipeline

SVG = "{http://www.w3.org/2000/svg}"
NASTY = 'a"b<c>&#d;|`e`\n\x00[f](g){h}\\'


def nothing() -> None:
    return None


def _pipeline_graphs() -> list[Graph]:
    pipeline = Pipeline.from_config(
        {"rollback": "verify_first", "transforms": [{"kind": "exclude", "keys": ["optimizer"]}]}
    )
    return [pipeline.save_graph, pipeline.load_graph]


def _nasty_graph() -> Graph:
    first = Node(NASTY, nothing, ("in & out",), (NASTY,))
    second = Node("<b>", nothing, (NASTY,), ("]]>",), where=Where.COORDINATOR)
    third = Node("last", nothing, (NASTY, "]]>"), (), coordinates=True)
    return Graph("n<m", [first, second, third], ["in & out"])


GRAPHS = [*_pipeline_graphs(), _nasty_graph(), Graph("empty", [], ["state"])]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_svg_is_xml_with_every_node_and_edge(graph: Graph) -> None:
    root = ElementTree.fromstring(draw(graph, "svg"))
    assert root.tag == f"{SVG}svg"
    shown = [group.get("data-name") for group in root.iter(f"{SVG}g")]
    edges = edges_of(graph)
    for node in graph:
        assert shown.count(_printable(node.name)) == 1
    arrows = [
        (path.get("data-from"), path.get("data-to"), path.get("data-value"))
        for path in root.iter(f"{SVG}path")
        if path.get("class") == "edge"
    ]
    assert sorted(map(str, arrows)) == sorted(
        str((_printable(e.source or ""), _printable(e.target), _printable(e.value))) for e in edges
    )


def test_svg_lies_within_its_own_frame() -> None:
    for graph in GRAPHS:
        root = ElementTree.fromstring(draw(graph, "svg"))
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for box in root.iter(f"{SVG}rect"):
            if box.get("class") == "page":
                continue
            assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
            assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
        for path in root.iter(f"{SVG}path"):
            if path.get("class") == "edge":
                places = [
                    float(number) for number in re.findall(r"[HV]([\d.]+)", path.get("d", ""))
                ]
                assert max(places) <= max(width, height)


def test_svg_highlights_coordination() -> None:
    root = ElementTree.fromstring(draw(_pipeline_graphs()[0], "svg"))
    kinds = {group.get("data-name"): group.get("class") for group in root.iter(f"{SVG}g")}
    together = {name for name, kind in kinds.items() if kind == "node together"}
    assert together == {"agree", "commit"}


def test_mermaid_escapes_names() -> None:
    text = draw(_nasty_graph(), "mermaid")
    escaped = "a#34;b#60;c#62;#38;#35;d#59;#124;#96;e#96;#92;n#92;x00#91;f#93;#40;g#41;"
    assert f"<b>{escaped}#123;h#125;#92;</b>" in text
    assert 'in0(["in #38; out"]):::value' in text
    for line in text.splitlines():
        assert line.count('"') in (0, 2), line


def test_mermaid_of_the_save() -> None:
    graph = _pipeline_graphs()[0]
    text = draw(graph, "mermaid")
    assert text.startswith("flowchart TD\n")
    for position, node in enumerate(graph):
        assert f'n{position}["<b>{node.name}</b>' in text
    assert text.count(":::together") == 2
    names = [node.name for node in graph]
    stage, write = names.index("stage"), names.index("write")
    assert f'n{stage} -->|"staged"| n{write}' in text


def test_text_has_one_line_per_node() -> None:
    for graph in GRAPHS:
        lines = draw(graph).splitlines()
        shown = [line for line in lines if "→" in line]
        assert len(shown) == len(graph.nodes)
        for node, line in zip(graph, shown, strict=True):
            assert _printable(node.name) in line
            assert ("all ranks together" in line) == node.coordinates
            taken, given = line.split("→")
            assert all(_printable(value) in taken for value in node.inputs)
            assert all(_printable(value) in given for value in node.outputs)


def test_an_input_that_most_nodes_take_is_named_in_them() -> None:
    save = _pipeline_graphs()[0]
    assert {edge.value for edge in edges_of(save) if edge.source is None} == {"state"}
    text = draw(save, "mermaid")
    assert text.count("<i>with job</i>") == sum("job" in node.inputs for node in save)


def test_an_unknown_style() -> None:
    with pytest.raises(GraphError, match="found the style 'png'; allowed: text, mermaid, svg"):
        draw(GRAPHS[0], "png")  # type: ignore[arg-type]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
