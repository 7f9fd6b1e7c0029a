"""`dcp-pipeline graph`: the nodes that a config comes to."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dcp_pipeline.cli.options import Recipe
from dcp_pipeline.config.compose import compose

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
        picture = draw(graph, style.value)
    if output is None:
        typer.echo(picture, nl=False)
        return
    try:
        output.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{output}: {error.strerror}", param_hint="--output") from None


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The name of the graph, and the overrides."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("~", "+")):
        return "save", arguments
    if arguments[0] not in _GRAPHS:
        raise typer.BadParameter(f"found the graph {arguments[0]!r}; allowed: {', '.join(_GRAPHS)}")
    return arguments[0], arguments[1:]
