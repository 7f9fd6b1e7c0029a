"""`dcp-pipeline prune`: remove what dead saves have left."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, show, size, table
from dcp_pipeline.tools.prune import Leftover, PruneReport, prune

__all__ = ["command"]


def command(
    root: Annotated[
        str,
        typer.Argument(
            help="Directory that holds checkpoints, or directory of one.", show_default=False
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what no committed checkpoint needs and no live save owns. In doubt it is kept."""
    report = prune(root, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "nbytes": report.nbytes}, indent=2))
    else:
        _show(report)
    for failure in report.failed:
        typer.secho(f"problem: {failure}", err=True)
    if report.failed:
        raise typer.Exit(1)


def _show(report: PruneReport) -> None:
    if report.removed:
        show(_leftovers("removed" if not report.is_dry_run else "to remove", report.removed))
    if report.kept:
        show(_leftovers("kept", report.kept))
    verb = "would be removed" if report.is_dry_run else "removed"
    show(f"{len(report.removed)} leftovers {verb}, {size(report.nbytes)}")


def _leftovers(title: str, leftovers: Iterable[Leftover]) -> Table:
    result = table(title, "bytes", "why", right=("bytes",))
    result.columns[-1].no_wrap = False
    for leftover in leftovers:
        result.add_row(cell(leftover.path), size(leftover.nbytes), cell(leftover.why))
    return result
