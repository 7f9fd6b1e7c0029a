"""`dcp-pipeline recipes`: the recipes that come with the package."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from dcp_pipeline.cli.estimate import estimate_table
from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, show, size, table
from dcp_pipeline.config.compose import load_recipe
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.config.recipe import Recipe
from dcp_pipeline.tools.estimate import Estimate, estimate

__all__ = ["command"]


def command(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Show all of this one; a name, or the path of a YAML file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes that come with the package, with their sizes; or show one of them."""
    if recipe is not None:
        _show_one(load_recipe(recipe), as_json)
        return
    found = [load_recipe(name) for name in recipe_names()]
    if as_json:
        typer.echo(json.dumps([_plain(one) for one in found], indent=2))
        return
    result = table(
        "recipe", "parameters", "model", "checkpoint", "description",
        right=("parameters", "model", "checkpoint"),
    )  # fmt: skip
    result.columns[-1].no_wrap = False
    for one in found:
        sizes = estimate(one)
        result.add_row(
            cell(one.name),
            _millions(sizes.parameters),
            size(sizes.model_total),
            size(sizes.checkpoint_bytes),
            cell(one.info.description),
        )
    show(result)


def _show_one(recipe: Recipe, as_json: bool) -> None:
    sizes = _sizes(recipe)
    if as_json:
        report = {
            **_plain(recipe),
            "parallel": recipe.info.parallel.model_dump(),
            "estimate": None if sizes is None else asdict(sizes),
            "tensors": {
                side: {pattern: list(shape) for pattern, shape in patterns.items()}
                for side, patterns in recipe.info.tensors.items()
            },
            "maps": {
                name: [rule.model_dump(mode="json") for rule in recipe.rules(name)]
                for name in recipe.maps
            },
        }
        typer.echo(json.dumps(report, indent=2))
        return
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("description", cell(recipe.info.description))
    for name, values in (("model", recipe.model), ("ranks", recipe.info.parallel.model_dump())):
        facts.add_row(name, cell(", ".join(f"{key} {value}" for key, value in values.items())))
    facts.add_row("maps", cell(", ".join(recipe.maps)))
    show(*([] if sizes is None else [estimate_table(sizes)]), facts)
    for side, patterns in recipe.info.tensors.items():
        result = table(side, "dtype", "shape", "tensors", right=("tensors",))
        for pattern, dtype, count, _ in recipe.sizes(side):
            shape = ", ".join(map(str, patterns[pattern]))
            result.add_row(cell(pattern), dtype, cell(f"[{shape}]"), f"{count:,}")
        show(result)


def _plain(recipe: Recipe) -> dict[str, Any]:
    sizes = _sizes(recipe)
    return {
        "name": recipe.name,
        "description": recipe.info.description,
        "model": dict(recipe.model),
        "maps": list(recipe.maps),
        "parameters": None if sizes is None else sizes.parameters,
        "checkpoint_bytes": None if sizes is None else sizes.checkpoint_bytes,
    }


def _sizes(recipe: Recipe) -> Estimate | None:
    return estimate(recipe) if recipe.info.tensors else None


def _millions(parameters: int) -> str:
    if parameters < 10**9:
        return f"{parameters / 10**6:.3g} M"
    return f"{parameters / 10**9:.3g} B"
