"""`dcp-pipeline ls`: the checkpoints in a directory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from dcp_pipeline.cli.inspect import files_table
from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import age, cell, show, size, table
from dcp_pipeline.tools.listing import CheckpointInfo, Listing, list_directory
from dcp_pipeline.tools.opening import State

__all__ = ["command"]

_STYLES = {
    State.COMMITTED: "green",
    State.FOREIGN: "cyan",
    State.IN_PROGRESS: "yellow",
    State.INCOMPLETE: "yellow",
    State.DAMAGED: "bold red",
}


def command(
    path: Annotated[
        str,
        typer.Argument(
            help="Directory that holds checkpoints, or directory of one.", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory, or the files of one checkpoint."""
    listing = list_directory(path)
    if as_json:
        typer.echo(json.dumps(_plain(listing), indent=2))
    elif listing.checkpoints:
        show(_checkpoint_table(listing.checkpoints))
        if listing.files is not None:
            show(files_table(listing.files))
    else:
        show(f"no checkpoints in {listing.path}")
    problems = [info for info in listing.checkpoints if info.problem]
    for info in problems:
        typer.secho(f"problem: {info.problem}", err=True)
    if problems:
        raise typer.Exit(1)


def _plain(listing: Listing) -> dict[str, object]:
    report: dict[str, object] = {
        "path": listing.path,
        "checkpoints": [asdict(info) for info in listing.checkpoints],
    }
    if listing.files is not None:
        report["files"] = [asdict(file) for file in listing.files]
    return report


def _checkpoint_table(checkpoints: Iterable[CheckpointInfo]) -> Table:
    numbers = ("step", "keys", "size", "age")
    result = table("checkpoint", "state", *numbers, right=numbers)
    for info in checkpoints:
        result.add_row(
            cell(info.name),
            cell(_state(info), _STYLES[info.state]),
            "" if info.step is None else str(info.step),
            "" if info.keys is None else str(info.keys),
            size(info.nbytes),
            age(info.age_seconds),
        )
    return result


def _state(info: CheckpointInfo) -> str:
    is_replaced = info.is_being_saved and info.state is not State.IN_PROGRESS
    words = [str(info.state)]
    words += ["being replaced"] * is_replaced
    words += ["pinned"] * info.is_pinned
    return ", ".join(words)
