"""`dcp-pipeline inspect`: what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, moment, show, size, table, terminal_width
from dcp_pipeline.tools.inspect import FileInfo, Inspection, KeyInfo, Summary, inspect

__all__ = ["command", "files_table"]

_WIDE = 120


def command(
    path: Annotated[str, typer.Argument(help="Directory of a checkpoint.", show_default=False)],
    keys: Annotated[
        str, typer.Option("--keys", help="List only keys that fit this glob: 'model.layers.*'")
    ] = "*",
    files: Annotated[bool, typer.Option("--files", help="List the files, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds; plain DCP's are read too. No tensor is read."""
    found = inspect(path, keys)
    if as_json:
        typer.echo(json.dumps(_plain(found, files), indent=2))
    else:
        show(_summary_table(found.summary, found.fingerprint), _key_table(found.keys))
        if files:
            show(files_table(found.files))
    for problem in found.problems:
        typer.secho(f"problem: {problem}", err=True)
    if found.problems:
        raise typer.Exit(1)


def _plain(found: Inspection, files: bool) -> dict[str, object]:
    report: dict[str, object] = {
        "summary": asdict(found.summary),
        "fingerprint": found.fingerprint,
        "keys": [asdict(key) for key in found.keys],
        "problems": list(found.problems),
    }
    if files:
        report["files"] = [asdict(file) for file in found.files]
    return report


def _summary_table(summary: Summary, fingerprint: str | None) -> Table:
    rows = {
        "checkpoint": summary.path,
        "kind": summary.kind,
        "save id": summary.save_id,
        "saved": None if summary.created is None else moment(summary.created),
        "ranks": summary.world_size,
        "versions": ", ".join(f"{name} {number}" for name, number in summary.versions.items()),
        "serialization": summary.serialization,
        "checksums": None
        if summary.checksum is None
        else f"{summary.checksum} of every {summary.block_bytes} bytes",
        "keys": f"{summary.keys} in {summary.chunks} chunks",
        "tensors": size(summary.tensor_bytes),
        "data files": f"{summary.files}, {size(summary.file_bytes)}",
        ".metadata": "yes: plain DCP opens it" if summary.has_metadata else "no",
        "fingerprint": fingerprint,
        "config digest": summary.config_digest,
    }
    result = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    for name, value in rows.items():
        if value not in (None, ""):
            result.add_row(name, cell(value))
    return result


def _key_table(keys: Iterable[KeyInfo]) -> Table:
    result = table("key", "dtype", "shape", "chunks", "bytes", "tied to", right=("chunks", "bytes"))
    # Names come first: on a narrow terminal nothing would be left of them.
    is_wide = terminal_width() >= _WIDE
    if is_wide:
        result.add_column("fingerprint", no_wrap=True)
    for key in keys:
        result.add_row(
            cell(key.name),
            cell(key.dtype if key.kind == "tensor" else _with_kind(key)),
            "" if key.shape is None else cell(list(key.shape)),
            "" if key.alias else str(key.chunks),
            size(key.nbytes),
            cell(key.alias),
            *([key.fingerprint or ""] if is_wide else []),
        )
    return result


def _with_kind(key: KeyInfo) -> str:
    return key.kind if key.dtype is None else f"{key.dtype} ({key.kind})"


def files_table(files: Iterable[FileInfo]) -> Table:
    """The files of a checkpoint; one that is missing or cut off stands out."""
    result = table("file", "role", "bytes", "expected", right=("bytes", "expected"))
    for file in files:
        style = "" if file.is_well else "bold red"
        result.add_row(
            cell(file.name, style),
            file.role,
            "missing" if file.size is None else str(file.size),
            "" if file.expected is None else str(file.expected),
        )
    return result
