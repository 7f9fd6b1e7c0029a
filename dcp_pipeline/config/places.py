"""Where the package's own YAML files lie, and which recipe a name means."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.registry import did_you_mean

__all__ = ["CONFIG_FOLDER", "CONFIG_PACKAGE", "Primary", "find_recipe", "recipe_names"]

_PACKAGE = Path(__file__).resolve().parents[1]

CONFIG_FOLDER = _PACKAGE / "conf" / "checkpoint"
"""The root of Hydra's search path in our own commands."""

CONFIG_PACKAGE = "pkg://dcp_pipeline.conf.checkpoint"
"""The same place, as an entry of Hydra's search path."""

_RECIPES = _PACKAGE / "recipes"


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary config of Hydra.

    Attributes:
        folder: the folder it lies in, the first on the search path.
        name: its name there, without ``.yaml``.
    """

    folder: Path
    name: str


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _RECIPES.glob("*.yaml")))


def find_recipe(recipe: str | os.PathLike[str] | None) -> Primary:
    """Return the config that a recipe's name, or the path of a YAML file, stands for.

    Raises:
        ConfigError: there is no such recipe.
    """
    if recipe is None:
        return Primary(CONFIG_FOLDER, "pipeline")
    if not _is_path(recipe):
        return _own_recipe(str(recipe))
    path = Path(recipe).expanduser().absolute()
    if path.suffix != ".yaml":
        raise ConfigError(f"the recipe {str(recipe)!r} must be a file named *.yaml", path="recipe")
    if not path.is_file():
        raise ConfigError(f"there is no recipe file {str(path)!r}", path="recipe")
    return Primary(path.parent, path.stem)


def _is_path(recipe: str | os.PathLike[str]) -> bool:
    text = os.fspath(recipe)
    return not isinstance(recipe, str) or os.sep in text or text.endswith((".yaml", ".yml"))


def _own_recipe(name: str) -> Primary:
    known = recipe_names()
    if name not in known:
        raise ConfigError(
            f"found the recipe {name!r}; allowed: {', '.join(known)}, or the path of a YAML file"
            f"{did_you_mean(name, known)}",
            path="recipe",
        )
    return Primary(CONFIG_FOLDER, name)
