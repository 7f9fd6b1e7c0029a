"""`dcp-pipeline latest`: the step to go on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.tools.latest import Latest, find_latest

__all__ = ["command"]


def command(
    root: Annotated[
        str, typer.Argument(help="Directory that holds checkpoints.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Print the path of the newest step that is whole; newer ones that are not are problems."""
    latest = find_latest(root)
    if as_json:
        typer.echo(json.dumps(asdict(latest), indent=2))
    elif latest.checkpoint is not None:
        typer.echo(latest.checkpoint.path)
    _say_what_is_skipped(latest)
    if latest.damaged:
        raise typer.Exit(1)


def _say_what_is_skipped(latest: Latest) -> None:
    for name, state in latest.unfinished.items():
        typer.secho(f"note: {name} is {state}", err=True)
    for name, why in latest.damaged.items():
        typer.secho(f"problem: {name}: {why}", err=True)
