"""`dcp-pipeline rules`: what the rules of a recipe's map do to keys."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from dcp_pipeline.cli.options import AsJson
from dcp_pipeline.cli.tables import cell, show, table
from dcp_pipeline.config.compose import load_recipe
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.tools.rule_check import Fate, RuleCheck, check_rules, keys_at

__all__ = ["app"]

_SHOWN = 40

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])|(?<=\.weight)\d+$")
"""A part of a key, or the number of an expert of Megatron's."""

_PARTS = {
    "problem": "problems",
    "no rule takes": "untaken",
    "nothing becomes": "missing",
    "the recipe does not know": "unexpected",
    "another shape": "misshapen",
}

app = typer.Typer(no_args_is_help=True, help="What the rules of a recipe's map do to keys.")


@app.callback()
def _group() -> None:
    """What the rules of a recipe's map do to keys."""


@app.command("check")
def check(
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Name of a recipe, or path of a YAML file.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="A checkpoint whose keys to take instead of the recipe's, and Hydra overrides: "
            "recipe.model.vocab=32000",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--map", "-m", help="Which map; without it, all of the recipe.")
    ] = None,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="Go through it the other way round.")
    ] = False,
    prefix: Annotated[
        str, typer.Option("--prefix", help="Take only keys below this, without it: 'app.model.'")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Say which rule takes which key, what it becomes, and what does not fit. No tensor is read."""
    paths = [one for one in arguments or () if "=" not in one or os.path.exists(one)]
    if len(paths) > 1:
        raise ConfigError(f"expected one checkpoint, found {', '.join(paths)}")
    found = load_recipe(recipe, [one for one in arguments or () if one not in paths])
    maps = [name] if name is not None else list(found.maps)
    if not maps or (paths and len(maps) > 1):
        raise ConfigError(
            f"name one of the maps of {found.name!r} with --map: {', '.join(found.maps) or 'none'}"
        )
    dequantize = "none" if found.info.quantized is None else found.info.dtype
    keys = keys_at(paths[0], prefix, dequantize) if paths else None
    checks = [check_rules(found, one, reverse, keys) for one in maps]
    if as_json:
        report = [{**asdict(one), "is_well": one.is_well} for one in checks]
        typer.echo(json.dumps(report, indent=2))
    else:
        for one in checks:
            _show(one)
    if not all(one.is_well for one in checks):
        raise typer.Exit(1)


def _show(found: RuleCheck) -> None:
    result = table(found.source, "keys", "rules", found.target, right=("keys",))
    result.title = found.map
    for column in result.columns[2:]:
        column.no_wrap, column.overflow = False, "fold"
    for (key, rules, became), count in Counter(map(_line, found.fates)).items():
        result.add_row(cell(key), str(count), cell(rules), cell(became))
    show(result)
    lines = [f"{words}: {line}" for words, part in _PARTS.items() for line in getattr(found, part)]
    for line in lines[:_SHOWN]:
        typer.secho(line, err=True)
    if len(lines) > _SHOWN:
        typer.secho(f"and {len(lines) - _SHOWN} more; --json has them all", err=True)


def _line(fate: Fate) -> tuple[str, str, str]:
    """A key's line, in which numbers are not told apart."""
    patterns = dict.fromkeys(map(_pattern, fate.became))
    became = ", ".join(patterns) if fate.rules else "no rule takes it"
    if len(fate.became) > len(patterns):
        became += f" ({len(fate.became)})"
    return _pattern(fate.key), ", ".join(fate.rules), became or "dropped"


def _pattern(key: str) -> str:
    return _NUMBER.sub("*", key)
