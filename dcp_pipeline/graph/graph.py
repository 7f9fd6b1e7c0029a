"""A graph of nodes, checked when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from dcp_pipeline.core.errors import GraphError
from dcp_pipeline.graph.node import Node

__all__ = ["Graph"]


class Graph:
    """Nodes that pass values on by name.

    Args:
        name: ``save`` or ``load``, for drawings and errors.
        nodes: in any order; they run in the order given as far as their inputs allow.
        inputs: values that are there before the first node runs.

    Raises:
        GraphError: two nodes of one name, an input that nothing makes, a value made twice, a cycle.
    """

    def __init__(self, name: str, nodes: Sequence[Node], inputs: Sequence[str] = ()) -> None:
        self.name = name
        self.inputs = tuple(inputs)
        self._makers = self._index(nodes)
        self.nodes = tuple(self._sorted(nodes))

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise GraphError(f"graph {self.name!r} has no node {name!r}; its nodes are {known}")

    def maker_of(self, value: str) -> Node | None:
        """The node that makes a value, ``None`` for an input of the graph."""
        return self._makers.get(value)

    def adding(self, *nodes: Node) -> Graph:
        """This graph with further nodes, each as early as its inputs allow."""
        listed = list(self.nodes)
        for node in nodes:
            made = {maker.name for name in node.inputs if (maker := self._makers.get(name))}
            place = max((i + 1 for i, other in enumerate(listed) if other.name in made), default=0)
            listed.insert(place if made else len(listed), node)
        return Graph(self.name, listed, self.inputs)

    def split(self, name: str, passed_on: Callable[[str], bool]) -> tuple[Graph, Graph]:
        """The nodes up to the one called ``name``, and those behind it.

        Args:
            passed_on: which of the values that the first graph knows are inputs of the second.

        Raises:
            GraphError: a node of the second graph needs a value that is not passed on.
        """
        end = self.nodes.index(self[name]) + 1
        first, second = self.nodes[:end], self.nodes[end:]
        known = (*self.inputs, *(output for node in first for output in node.outputs))
        inputs = [value for value in known if passed_on(value)]
        return Graph(self.name, first, self.inputs), Graph(self.name, second, inputs)

    def through(self, value: str, node: Node) -> Graph:
        """This graph with ``node`` put in behind whatever makes ``value``.

        The node takes ``value`` and gives ``value``: what used it before now gets the node's.
        """
        maker = self._makers.get(value)
        if maker is None:
            raise GraphError(
                f"node {node.name!r} cannot be put in behind {value!r}: no node of graph"
                f" {self.name!r} makes it; they make {', '.join(sorted(self._makers))}"
            )
        if value not in node.inputs or value not in node.outputs:
            raise GraphError(
                f"node {node.name!r} has to take and give {value!r} to be put in there"
            )
        inner = f"{value} before {node.name}"
        outputs = tuple(inner if output == value else output for output in maker.outputs)
        before = _Renamed(maker, outputs=outputs)
        after = _Renamed(node, inputs=tuple(inner if i == value else i for i in node.inputs))
        nodes: list[Node] = []
        for known in self.nodes:
            nodes += [before.node, after.node] if known is maker else [known]
        return Graph(self.name, nodes, self.inputs)

    def _index(self, nodes: Sequence[Node]) -> dict[str, Node]:
        makers: dict[str, Node] = {}
        names: set[str] = set()
        for node in nodes:
            if node.name in names:
                raise GraphError(f"graph {self.name!r} has two nodes named {node.name!r}")
            names.add(node.name)
            for output in node.outputs:
                if output in makers or output in self.inputs:
                    other = makers[output].name if output in makers else "the graph's input"
                    raise GraphError(
                        f"graph {self.name!r}: {output!r} is made twice, by {other!r} and by"
                        f" {node.name!r}"
                    )
                makers[output] = node
        for node in nodes:
            for name in node.inputs:
                if name not in makers and name not in self.inputs:
                    there = ", ".join(sorted({*makers, *self.inputs}))
                    raise GraphError(
                        f"graph {self.name!r}: node {node.name!r} needs {name!r}, which nothing"
                        f" makes; there is {there}"
                    )
        return makers

    def _sorted(self, nodes: Sequence[Node]) -> list[Node]:
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for node in nodes:
            before = [self._makers[name].name for name in node.inputs if name in self._makers]
            sorter.add(node.name, *before)
        try:
            sorter.prepare()
        except CycleError as error:
            raise GraphError(
                f"graph {self.name!r} has a cycle: {' -> '.join(error.args[1])}"
            ) from error
        place = {node.name: position for position, node in enumerate(nodes)}
        ordered: list[Node] = []
        ready: list[str] = []
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=place.__getitem__)
            first = ready.pop(0)
            ordered.append(nodes[place[first]])
            sorter.done(first)
        return ordered


class _Renamed:
    """A node whose function keeps its own argument names while the graph uses others."""

    def __init__(
        self,
        node: Node,
        inputs: tuple[str, ...] | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> None:
        self._function = node.function
        self._names = dict(zip(inputs or node.inputs, node.inputs, strict=True))
        self.node = replace(
            node,
            inputs=inputs or node.inputs,
            outputs=outputs or node.outputs,
            function=node.function if inputs in (None, node.inputs) else self._call,
        )

    def _call(self, **values: object) -> object:
        return self._function(**{self._names.get(name, name): v for name, v in values.items()})
