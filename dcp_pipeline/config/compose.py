"""Configs by Hydra: overrides, recipes, and the node that a user's own Hydra program has."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError

from dcp_pipeline.config.explain import explain, validate
from dcp_pipeline.config.hydra_errors import hydra_errors
from dcp_pipeline.config.hydra_state import hydra_of_our_own
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.config.overrides import force_values
from dcp_pipeline.config.places import CONFIG_FOLDER, CONFIG_PACKAGE, Primary, find_recipe
from dcp_pipeline.config.recipe import Recipe
from dcp_pipeline.config.recipe_info import RecipeInfo
from dcp_pipeline.core.errors import ConfigError

__all__ = ["Composed", "compose", "from_user", "load_mapping", "load_recipe"]


@dataclass(frozen=True, slots=True)
class Composed:
    """A config, and the header of the recipe it was composed from, if there was one."""

    config: PipelineConfig
    recipe: RecipeInfo | None = None


def compose(
    overrides: Sequence[str] = (), recipe: str | os.PathLike[str] | None = None
) -> Composed:
    """Compose a config from Hydra overrides and a recipe; the overrides win.

    >>> compose(["storage=memory", "rollback=none"]).config.storage.kind
    'memory'

    Args:
        overrides: as on the command line, such as ``serialization=safetensors`` or
            ``storage.thread_count=4``.
        recipe: name of one of the package's recipes, or path of a YAML file that extends
            ``pipeline`` (or a recipe) in its defaults list.

    Raises:
        ConfigError: with the path of the key, and what is allowed.
    """
    primary = find_recipe(recipe)
    with hydra_errors(primary), hydra_of_our_own():
        plain = _plain(_composed(primary, overrides))
    return _checked(plain)


def load_recipe(recipe: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """What a recipe says of its model: dimensions, tensors by formula, maps between frameworks.

    >>> load_recipe("llama3_8b").model["hidden"]
    4096

    Args:
        recipe: name of one of the package's recipes, or path of a YAML file.
        overrides: as on the command line, such as ``recipe.model.layers=2``.

    Raises:
        ConfigError: with the path of the key, and what is allowed.
    """
    info = compose(overrides, recipe).recipe
    return Recipe(info or RecipeInfo(name=find_recipe(recipe).name))


def load_mapping(
    source: PipelineConfig | Mapping[str, Any] | str | os.PathLike[str],
) -> PipelineConfig:
    """Make a config of a mapping, or of a YAML file.

    Keys that are left out take their defaults. A file with a defaults list is composed by Hydra,
    as `compose` does. A header ``recipe`` is taken off.

    >>> load_mapping({"storage": {"kind": "memory"}}).storage.kind
    'memory'

    Raises:
        ConfigError: with the path of the key, and what is allowed.
    """
    if isinstance(source, PipelineConfig):
        return source
    if isinstance(source, DictConfig):
        return from_user(source)
    if isinstance(source, Mapping):
        return _checked(source).config
    return compose(recipe=Path(source)).config


def from_user(node: DictConfig) -> PipelineConfig:
    """Make a config of the node that a user's Hydra program has, usually ``cfg.checkpoint``.

    Errors name the keys by their path in the whole program's config.

    Raises:
        ConfigError: with the path of the key, and what is allowed.
    """
    with hydra_errors():
        plain = _plain(node)
    return _checked(plain, prefix=str(node._get_full_key(None))).config


def _composed(primary: Primary, overrides: Sequence[str]) -> DictConfig:
    arguments = force_values(overrides)
    if primary.folder != CONFIG_FOLDER:
        arguments.append(f"hydra.searchpath=[{CONFIG_PACKAGE}]")
    with initialize_config_dir(str(primary.folder), "dcp_pipeline", version_base="1.3"):
        return hydra_compose(primary.name, arguments)


def _plain(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    if not isinstance(plain, dict):
        raise ConfigError(f"expected a mapping with the config's keys, found {plain!r}")
    return plain


def _checked(data: Mapping[str, Any], prefix: str = "") -> Composed:
    settings = dict(data)
    header = _header(settings.pop("recipe", None), prefix)
    if header is None or header.map is None:
        return Composed(validate(settings, prefix), header)
    config = validate(settings, prefix)
    rules = Recipe(header).rules(header.map)
    return Composed(config.model_copy(update={"transforms": (*config.transforms, *rules)}), header)


def _header(data: Any, prefix: str) -> RecipeInfo | None:
    if data is None:
        return None
    try:
        return RecipeInfo.model_validate(data)
    except ValidationError as error:
        path = f"{prefix}.recipe".removeprefix(".")
        raise explain(error, data, path, header=RecipeInfo) from None
