from typing import Any

import pytest

from dcp_pipeline.core.errors import GraphError
from dcp_pipeline.graph.graph import Graph
from dcp_pipeline.graph.node import Node, Where
from dcp_pipeline.graph.runner import run
from dcp_pipeline.graph.trace import Trace


def give(*values: Any) -> Any:
    return lambda **inputs: values[0] if len(values) == 1 else values


def chain() -> list[Node]:
    return [
        Node("first", lambda start: start + 1, ("start",), ("a",)),
        Node("second", lambda a: (a * 2, a * 3), ("a",), ("b", "c")),
        Node("third", lambda b, c: b + c, ("b", "c"), ("d",)),
    ]


def traced(
    graph: Graph, values: dict[str, Any], **options: Any
) -> tuple[dict[str, Any], list[str]]:
    trace = Trace(graph.name, 0)
    result = run(graph, values, trace, **options)
    return result, [timing.node for timing in trace.timings]


def test_values_flow_by_name() -> None:
    values, order = traced(Graph("g", chain(), ["start"]), {"start": 1})
    assert values == {"start": 1, "a": 2, "b": 4, "c": 6, "d": 10}
    assert order == ["first", "second", "third"]


def test_nodes_are_sorted_by_what_they_need_and_else_stay_in_order() -> None:
    assert [n.name for n in Graph("g", chain()[::-1], ["start"])] == ["first", "second", "third"]
    free = [Node(name, give(1)) for name in "cab"]
    assert [node.name for node in Graph("g", free)] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([Node("n", give(1), ("missing",))], "'n' needs 'missing'"),
        ([Node("n", give(1)), Node("n", give(1))], "two nodes named 'n'"),
        ([Node("m", give(1), (), ("v",)), Node("n", give(1), (), ("v",))], "'v' is made twice"),
        ([Node("n", give(1), (), ("given",))], "'given' is made twice, by \"the graph's input\""),
        ([Node("n", give(1), ("v",), ("v",))], "cycle"),
        ([Node("m", give(1), ("w",), ("v",)), Node("n", give(1), ("v",), ("w",))], "cycle"),
    ],
)
def test_graphs_that_cannot_run(nodes: list[Node], said: str) -> None:
    with pytest.raises(GraphError) as caught:
        Graph("g", nodes, ["given"])
    assert said in str(caught.value) and "'g'" in str(caught.value)


def test_a_node_that_coordinates_runs_everywhere() -> None:
    with pytest.raises(GraphError, match="every rank"):
        Node("n", give(1), where=Where.COORDINATOR, coordinates=True)


def test_lookups() -> None:
    graph = Graph("g", chain(), ["start"])
    assert graph["second"].outputs == ("b", "c")
    maker = graph.maker_of("c")
    assert maker is not None and maker.name == "second" and graph.maker_of("start") is None
    with pytest.raises(GraphError, match="first, second, third"):
        graph["fourth"]


def test_a_node_put_in_behind_a_value() -> None:
    graph = Graph("g", chain(), ["start"])
    doubled = graph.through("a", Node("double", lambda a: a * 2, ("a",), ("a",)))
    values, order = traced(doubled, {"start": 1})
    assert order == ["first", "double", "second", "third"]
    assert (values["a"], values["d"]) == (4, 20)
    twice = doubled.through("a", Node("add", lambda a, start: a + start, ("a", "start"), ("a",)))
    values, order = traced(twice, {"start": 1})
    assert order == ["first", "double", "add", "second", "third"]
    assert (values["a"], values["d"]) == (5, 25)
    # The first graph is what it was.
    assert traced(graph, {"start": 1})[0]["d"] == 10


@pytest.mark.parametrize(
    ("value", "node"),
    [
        ("none", Node("n", give(1), ("none",), ("none",))),
        ("start", Node("n", give(1), ("start",), ("start",))),
        ("a", Node("n", give(1), ("a",), ("new",))),
        ("a", Node("n", give(1), ("b",), ("a",))),
    ],
)
def test_a_node_that_cannot_be_put_in(value: str, node: Node) -> None:
    with pytest.raises(GraphError, match="'n'"):
        Graph("g", chain(), ["start"]).through(value, node)


def test_further_nodes_are_added() -> None:
    seen = []
    watch = Node("watch", lambda d: seen.append(d), ("d",))
    traced(Graph("g", chain(), ["start"]).adding(watch), {"start": 1})
    assert seen == [10]


def fail(**values: Any) -> None:
    raise ValueError("no")


def failing_graph(calls: list[Any]) -> Graph:
    def agree(a: Any, failure: BaseException | None) -> None:
        calls.append((a, failure))
        if failure is not None:
            raise RuntimeError("together") from failure

    return Graph(
        "g",
        [
            Node("fails", fail, (), ("a",)),
            Node("left out", lambda a: calls.append("left out"), ("a",), ("b",)),
            Node("agree", agree, ("a",), ("c",), coordinates=True),
            Node("last", lambda c: calls.append("last"), ("c",)),
        ],
    )


def test_after_a_failure_only_the_next_node_that_coordinates_runs() -> None:
    calls: list[Any] = []
    reported: list[BaseException] = []
    with pytest.raises(RuntimeError, match="together") as caught:
        traced(failing_graph(calls), {}, on_failure=reported.append)
    ((value, failure),) = calls
    assert value is None and isinstance(failure, ValueError)
    assert reported == [failure] and caught.value.__cause__ is failure
    assert (failure.node, failure.rank) == ("fails", 0)  # type: ignore[attr-defined]
    assert caught.value.node == "agree"  # type: ignore[attr-defined]
    assert "in node 'agree' on rank 0" in caught.value.__notes__


def test_a_failure_that_nobody_coordinates_is_raised() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        traced(Graph("g", [Node("fails", fail), Node("other", give(1))]), {})
    assert caught.value.__notes__ == ["in node 'fails' on rank 0"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_held_back(error: type[BaseException]) -> None:
    calls: list[Any] = []

    def stop(**values: Any) -> None:
        raise error

    nodes = [Node("stops", stop, (), ("a",)), *failing_graph(calls).nodes[1:]]
    with pytest.raises(error):
        traced(Graph("g", nodes), {})
    assert calls == []


@pytest.mark.parametrize("is_coordinator", [True, False])
def test_nodes_of_the_coordinator(is_coordinator: bool) -> None:
    graph = Graph("g", [Node("here", give(3), (), ("v",), Where.COORDINATOR)])
    values, order = traced(graph, {}, is_coordinator=is_coordinator)
    assert values["v"] == (3 if is_coordinator else None)
    assert order == (["here"] if is_coordinator else [])


@pytest.mark.parametrize("result", [1, (1,), (1, 2, 3), [1, 2]])
def test_a_node_has_to_return_what_it_announced(result: Any) -> None:
    with pytest.raises(GraphError, match="tuple of 2 values"):
        traced(Graph("g", [Node("n", lambda: result, (), ("a", "b"))]), {})


class Sized:
    nbytes = 1000


def test_the_trace_has_time_bytes_and_rate() -> None:
    trace = Trace("g", 3)
    run(Graph("g", [Node("moves", lambda: Sized(), (), ("a",)), Node("idle", give(1))]), {}, trace)
    assert trace["moves"].nbytes == 1000 and trace["idle"].nbytes is None
    assert trace["moves"].rate is not None and trace["moves"].rate > 0
    assert trace.seconds == sum(timing.seconds for timing in trace.timings)
    assert "moves" in str(trace) and "GB/s" in str(trace)
    with pytest.raises(KeyError):
        trace["none"]


def test_a_coordinating_node_that_fails_here_alone_is_told_at_the_next_one() -> None:
    told: list[BaseException | None] = []

    def fails_alone(failure: BaseException | None) -> int:
        raise ValueError("after its exchange")

    def agree(a: Any, failure: BaseException | None) -> None:
        told.append(failure)
        raise RuntimeError("together") from failure

    nodes = [
        Node("open", fails_alone, (), ("a",), coordinates=True),
        Node("agree", agree, ("a",), coordinates=True),
    ]
    with pytest.raises(RuntimeError, match="together"):
        traced(Graph("g", nodes), {})
    assert isinstance(told[0], ValueError)


def test_an_error_that_all_ranks_know_ends_the_run_at_once() -> None:
    class Joint(Exception):
        is_shared = True

    def fails_together(failure: BaseException | None) -> int:
        raise Joint

    never: list[int] = []
    nodes = [
        Node("open", fails_together, (), ("a",), coordinates=True),
        Node("agree", lambda a, failure: never.append(1), ("a",), coordinates=True),
    ]
    with pytest.raises(Joint):
        traced(Graph("g", nodes), {})
    assert never == []
