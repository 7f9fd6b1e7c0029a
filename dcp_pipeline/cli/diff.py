"""`dcp-pipeline diff`: what is different between two checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, show, size, table
from dcp_pipeline.tools.diff_report import Difference, DiffReport

__all__ = ["command"]

_MAX_ROWS = 50


def command(
    a: Annotated[
        str, typer.Argument(help="A checkpoint of any kind that can be read.", show_default=False)
    ],
    b: Annotated[str, typer.Argument(help="Another one.", show_default=False)],
    rtol: Annotated[
        float, typer.Option("--rtol", help="Alike if |a - b| <= atol + rtol * |b|.", min=0)
    ] = 0.0,
    atol: Annotated[
        float, typer.Option("--atol", help="With neither of them, if the bits are.", min=0)
    ] = 0.0,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Compare keys that fit: 'model.layers.*'")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="And not those that fit: 'optimizer'")
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", help="How many threads read and compare.", min=1, max=64)
    ] = 4,
    memory: Annotated[
        str, typer.Option("--memory", help="What tensors may take: 512MiB, 8GiB")
    ] = "2GiB",
    as_json: AsJson = False,
) -> None:
    """Compare the keys, shapes, dtypes and values of two checkpoints, of any two formats.

    Exit code 0 if they are alike, 1 if they differ.
    """
    from dcp_pipeline.tools.diff import diff

    report = diff(
        a,
        b,
        rtol=rtol,
        atol=atol,
        only=only or (),
        drop=drop or (),
        threads=threads,
        memory=memory,
    )
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2, allow_nan=False))
    else:
        _show(report)
    if not report.is_alike:
        raise typer.Exit(1)


def _plain(report: DiffReport) -> dict[str, object]:
    plain = asdict(report)
    for difference in plain["differences"]:
        for name in ("max_abs", "max_rel"):
            number = difference[name]
            # JSON has no infinity.
            if number is not None and not math.isfinite(number):
                difference[name] = str(number)
    return {"is_alike": report.is_alike, **plain}


def _show(report: DiffReport) -> None:
    show(cell(f"a: {report.a} ({report.a_kind})", "bold"))
    show(cell(f"b: {report.b} ({report.b_kind})", "bold"))
    by_fingerprint = (
        f"; {report.by_fingerprint} are alike by the fingerprints of both, and were not read"
        if report.by_fingerprint
        else ""
    )
    show(f"{report.keys} keys are in both, {size(report.nbytes)} were compared{by_fingerprint}")
    if report.is_alike:
        show(cell("no difference", "green"))
        return
    show(_table(report.differences[:_MAX_ROWS]))
    more = len(report.differences) - _MAX_ROWS
    if more > 0:
        show(f"and {more} more; --json has them all")
    show(cell(f"{len(report.differences)} keys differ", "bold red"))


def _table(differences: Sequence[Difference]) -> Table:
    result = table("key", "what", "a", "b", "different", "max abs", "max rel", "first",
                   right=("different", "max abs", "max rel"))  # fmt: skip
    for column in result.columns[1:4]:
        column.no_wrap, column.overflow = False, "fold"
    for one in differences:
        is_counted = bool(one.different)
        result.add_row(
            cell(one.name, "bold red"),
            one.what,
            cell(one.a),
            cell(one.b),
            f"{one.different} of {one.elements}" if is_counted else "",
            f"{one.max_abs:.3g}" if is_counted and one.max_abs is not None else "",
            f"{one.max_rel:.3g}" if is_counted and one.max_rel is not None else "",
            "" if one.first is None else str(list(one.first)),
        )
    return result
