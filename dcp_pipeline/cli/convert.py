"""`dcp-pipeline convert`: one checkpoint as another, of any layout."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dcp_pipeline.cli.options import AsJson, Overrides, Recipe
from dcp_pipeline.cli.tables import cell, show, size, table
from dcp_pipeline.config.compose import compose
from dcp_pipeline.core.errors import ConfigError, list_some
from dcp_pipeline.tools.launched import launched_ranks

if TYPE_CHECKING:
    from dcp_pipeline.tools.convert import Conversion

__all__ = ["command"]

_SHOWN = 40


def command(
    source: Annotated[str, typer.Argument(help="A checkpoint of any kind.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Where it goes.", show_default=False)],
    overrides: Overrides = None,
    recipe: Recipe = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Layout of the target: dcp, huggingface, mega, …")
    ] = None,
    source_kind: Annotated[
        str | None, typer.Option("--from", help="Kind of the source, if not to be recognised.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Apply the rules backward.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Glob of keys of the source; repeatable.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="Glob of keys to leave out; repeatable.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="What floating-point tensors become.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="Of a file, such as 5GB.")
    ] = None,
    average: Annotated[
        list[str] | None,
        typer.Option("--average", help="A further checkpoint to average with; repeatable."),
    ] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Of each in the average: 0.5,0.25,0.25")
    ] = None,
    dequantize: Annotated[
        str | None, typer.Option("--dequantize", help="Read codes and scales as this dtype.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="That tensors may take on this rank.")
    ] = "2GiB",
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not read the target again.")
    ] = False,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Keep nothing for another try when broken off.")
    ] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Say what would be written.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another layout, with other names, shapes or dtypes.

    Under torchrun the ranks share the work.
    """
    config = compose(overrides or (), recipe).config
    shares = _numbers(weights)
    with (
        launched_ranks() as rank,
        _progress(rank == 0 and not as_json and sys.stderr.isatty()) as progress,
    ):
        from dcp_pipeline.tools.convert import convert

        done = convert(
            [source, *(average or [])],
            target,
            to=to,
            config=config,
            source_kind=source_kind,
            source_options={"dequantize": dequantize} if dequantize else None,
            reverse=reverse,
            only=only or (),
            drop=drop or (),
            dtype=dtype,
            max_shard_size=max_shard_size,
            weights=shares,
            memory=memory,
            check=not no_check,
            resume=not no_resume,
            plan_only=plan_only,
            progress=progress,
        )
    if rank:
        return
    if as_json:
        typer.echo(json.dumps({**asdict(done), "plan_only": plan_only}, indent=2))
        return
    _show(done, plan_only)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights takes numbers: 0.5,0.25,0.25; found {text!r}") from None


@contextlib.contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not is_shown:
        yield None
        return
    columns: Any = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("convert", total=None)

        def update(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield update


def _show(done: Conversion, plan_only: bool) -> None:
    sources = list_some(done.source, 4)
    verb = "would become" if plan_only else "became"
    show(cell(f"{sources} ({done.source_kind}) {verb} {done.target} ({done.target_kind})", "bold"))
    show(f"{len(done.keys)} keys, {size(done.nbytes)}")
    if plan_only:
        rows = table("key", "dtype", "shape", "made of", "by")
        for key in done.keys[:_SHOWN]:
            made_of = "" if key.sources == (key.name,) else list_some(key.sources, 3)
            rows.add_row(
                cell(key.name),
                key.dtype or "value",
                str(list(key.shape)) if key.dtype else "",
                cell(made_of),
                list_some(key.rules, 4),
            )
        show(rows)
        if len(done.keys) > _SHOWN:
            show(f"and {len(done.keys) - _SHOWN} more; --json shows all")
    if done.dropped:
        show(cell(f"left out by rules: {list_some(done.dropped, 10)}", "yellow"))
    for name, count in done.casts.items():
        show(cell(f"{count} elements of {name} did not fit their new dtype", "yellow"))
    if not plan_only:
        show(f"took {done.seconds:.1f} s; the values have the fingerprint {done.fingerprint}")
        how = "read again and compared" if done.is_checked else "not read again"
        show(cell(f"the target was {how}", "green" if done.is_checked else "yellow"))
