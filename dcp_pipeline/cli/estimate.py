"""`dcp-pipeline estimate`: how large a model's checkpoints are, by formula."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from dcp_pipeline.cli.options import AsJson, Overrides
from dcp_pipeline.cli.tables import cell, show, size
from dcp_pipeline.config.compose import load_recipe
from dcp_pipeline.tools.estimate import Estimate, estimate

__all__ = ["command", "estimate_table"]


def command(
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Name of a recipe, or path of a YAML file.")
    ],
    overrides: Overrides = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="That share the writing; else the recipe's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the sizes of a model's checkpoints by formula, without weights."""
    found = estimate(load_recipe(recipe, overrides or ()), ranks)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show(estimate_table(found))


def estimate_table(found: Estimate) -> Table:
    """The estimate, one line for each size."""
    result = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    result.add_column(no_wrap=True, style="bold")
    result.add_column(overflow="fold")
    rows = {
        "recipe": found.recipe,
        "parameters": f"{found.parameters:,} in {found.tensors:,} tensors",
        "model": _by_name(found.model_bytes),
        "published": None if found.published_bytes is None else _by_name(found.published_bytes),
        "training": _by_name(found.training_bytes),
        "checkpoint": f"{size(found.checkpoint_bytes)} ({found.checkpoint_bytes:,} bytes)",
        "on each rank": f"{size(found.bytes_per_rank)}, of {found.ranks}",
    }
    for name, value in rows.items():
        if value is not None:
            result.add_row(name, cell(value))
    return result


def _by_name(nbytes: dict[str, int]) -> str:
    parts = [f"{size(count)} {name}" for name, count in nbytes.items() if count]
    total = f" = {size(sum(nbytes.values()))}" if len(parts) > 1 else ""
    return " + ".join(parts) + total
