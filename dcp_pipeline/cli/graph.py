"""`dcp-pipeline graph`: the nodes that a config comes to."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp_pipeline.cli.options import AsJson, Recipe
from dcp_pipeline.config.compose import compose

if TYPE_CHECKING:
    from dcp_pipeline.graph.graph import Graph

__all__ = ["command"]

_GRAPHS = ("save", "load")


class Format(StrEnum):
    """How a graph is drawn."""

    TEXT = "text"
    MERMAID = "mermaid"
    SVG = "svg"


def command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[save|load] [OVERRIDES]",
            help="Which graph (save by default), then Hydra overrides: rollback=verify_first",
            show_default=False,
        ),
    ] = None,
    recipe: Recipe = None,
    as_json: AsJson = False,
    style: Annotated[Format, typer.Option("--format", "-f", help="How to draw it.")] = Format.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a file.", dir_okay=False, show_default=False),
    ] = None,
) -> None:
    """Draw the graph of nodes that a config comes to."""
    which, overrides = _split(arguments or [])
    config = compose(overrides, recipe).config

    from dcp_pipeline.graph.drawing import draw
    from dcp_pipeline.pipeline import Pipeline

    with Pipeline(config) as pipeline:
        graph = pipeline.save_graph if which == "save" else pipeline.load_graph
        picture = _listed(graph) if as_json else draw(graph, style.value)
    if output is None:
        typer.echo(picture, nl=False)
        return
    try:
        output.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{output}: {error.strerror}", param_hint="--output") from None


def _listed(graph: Graph) -> str:
    nodes = [
        {
            "name": node.name,
            "where": node.where.value,
            "coordinates": node.coordinates,
            "inputs": list(node.inputs),
            "outputs": list(node.outputs),
        }
        for node in graph
    ]
    return json.dumps({"graph": graph.name, "inputs": list(graph.inputs), "nodes": nodes}) + "\n"


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of the graph, and the overrides."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("~", "+")):
        return "save", arguments
    if arguments[0] not in _GRAPHS:
        raise typer.BadParameter(f"found the graph {arguments[0]!r}; allowed: {', '.join(_GRAPHS)}")
    return arguments[0], arguments[1:]
