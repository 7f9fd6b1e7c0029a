"""`dcp-pipeline recipes`: the recipes that come with the package."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.config.compose import compose
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.config.recipe_info import RecipeInfo

__all__ = ["command"]


def command(as_json: AsJson = False) -> None:
    """List the recipes that come with the package."""
    recipes = [compose(recipe=name).recipe or RecipeInfo(name=name) for name in recipe_names()]
    if as_json:
        typer.echo(json.dumps([recipe.model_dump() for recipe in recipes], indent=2))
        return
    table = Table("recipe", "description")
    for recipe in recipes:
        table.add_row(recipe.name, recipe.description)
    Console().print(table)
