"""`dcp-pipeline verify`: every byte of a checkpoint against what was written."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, show, size, table
from dcp_pipeline.core.errors import list_some
from dcp_pipeline.tools.verify import Problem, VerifyReport, verify_all

__all__ = ["command"]

_MAX_KEYS = 8


def command(
    path: Annotated[
        str,
        typer.Argument(
            help="Directory of a checkpoint, or directory that holds checkpoints.",
            show_default=False,
        ),
    ],
    threads: Annotated[
        int, typer.Option("--threads", help="How many threads read.", min=1, max=64)
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and name files, keys and ranks that are not as written."""
    with _progress(is_shown=not as_json and sys.stderr.isatty()) as progress:
        reports = verify_all(path, threads=threads, progress=progress)
    if as_json:
        typer.echo(json.dumps({"checkpoints": [_plain(report) for report in reports]}, indent=2))
    else:
        for report in reports:
            _show(report)
    if not all(report.is_well for report in reports):
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(is_shown: bool) -> Iterator[_Bars | None]:
    if not is_shown:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bars:
        yield _Bars(bars)


class _Bars:
    """A bar for each checkpoint."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def __call__(self, path: str) -> _Bar:
        name = cell(os.path.basename(path)).plain.replace("[", r"\[")
        return _Bar(self._bars, name)


class _Bar:
    def __init__(self, bars: Progress, name: str) -> None:
        self._bars, self._task = bars, bars.add_task(name, total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=max(done, total))


def _plain(report: VerifyReport) -> dict[str, object]:
    return {"is_well": report.is_well, **asdict(report)}


def _show(report: VerifyReport) -> None:
    kind = report.kind if not report.save_id else f"{report.kind}, save {report.save_id}"
    show(cell(f"{report.path} ({kind})", "bold"))
    show(
        f"read {report.files} files, {size(report.nbytes)}, {report.keys} keys in"
        f" {report.chunks} chunks"
    )
    if report.problems:
        show(_problem_table(report.problems))
    for note in report.notes:
        show(cell(f"note: {note}"))
    for what in report.not_verified:
        show(cell(f"not verified: {what}", "yellow"))
    if report.is_well and report.fingerprint:
        show(f"the values have the fingerprint {report.fingerprint}")
    if report.is_well:
        show(cell("nothing is wrong", "green"))
    else:
        show(cell(f"{len(report.problems)} problems", "bold red"))


def _problem_table(problems: tuple[Problem, ...]) -> Table:
    result = table("file", "rank", "found", "expected", "keys", right=("rank",))
    for column in result.columns[2:]:
        column.no_wrap = False
    for problem in problems:
        result.add_row(
            cell(problem.file, "bold red"),
            "" if problem.rank is None else str(problem.rank),
            cell(problem.found),
            cell(problem.expected),
            cell(list_some(problem.keys, _MAX_KEYS)),
        )
    return result
