"""`dcp-pipeline config`: the config that a recipe and overrides come to."""

from __future__ import annotations

import json

import typer
from omegaconf import OmegaConf

from dcp_pipeline.cli.options import AsJson, Overrides, Recipe
from dcp_pipeline.config.compose import Composed, compose

__all__ = ["command"]


def command(overrides: Overrides = None, recipe: Recipe = None, as_json: AsJson = False) -> None:
    """Show the config that a recipe and overrides come to, checked and complete."""
    composed = compose(overrides or (), recipe)
    typer.echo(_json(composed) if as_json else _yaml(composed), nl=as_json)


def _json(composed: Composed) -> str:
    report = {
        "config": composed.config.to_dict(),
        "digest": composed.config.digest(),
        "recipe": composed.recipe.model_dump(include={"name", "description"})
        if composed.recipe
        else None,
    }
    return json.dumps(report, indent=2)


def _yaml(composed: Composed) -> str:
    lines = [f"# digest: {composed.config.digest()}\n"]
    if composed.recipe:
        lines.insert(0, f"# recipe: {composed.recipe.name}: {composed.recipe.description}\n")
    return "".join(lines) + OmegaConf.to_yaml(OmegaConf.create(composed.config.to_dict()))
