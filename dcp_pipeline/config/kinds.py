"""From what a config says about a group to the config of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.core.registry import model_of

__all__ = ["kind_config"]


def kind_config(group: str, default: str | None, value: object) -> KindConfig:
    """Validate a group's value: the config of a kind, a mapping, or the name of a kind.

    Args:
        group: name of the group.
        default: the kind of a mapping that names none; ``None`` when it has to.
        value: what the config says.

    Raises:
        ValidationError: with locations below the group.
    """
    if isinstance(value, KindConfig):
        return _built(group, value)
    if isinstance(value, str):
        return _model(group, value, ()).model_validate({"kind": value})
    if not isinstance(value, Mapping):
        raise ValueError("expected the name of a kind, or a mapping with a kind and its keys")
    kind = value.get("kind", default)
    if kind is None:
        _refuse("missing; it must name a kind", ("kind",), kind)
    if not isinstance(kind, str):
        _refuse("expected the name of a kind", ("kind",), kind)
    return _model(group, kind, ("kind",)).model_validate({**value, "kind": kind})


def _built(group: str, config: KindConfig) -> KindConfig:
    model = _model(group, config.kind, ())
    if not isinstance(config, model):
        raise ValueError(
            f"expected the config of a {group}: kind {config.kind!r} of it is {model.__qualname__}"
        )
    return config


def _model(group: str, kind: str, location: tuple[str, ...]) -> type[KindConfig]:
    try:
        return model_of(group, kind)
    except ConfigError as error:
        _refuse(error.message, location, kind)


def _refuse(message: str, location: tuple[str, ...], found: Any) -> NoReturn:
    error = PydanticCustomError("config", "{message}", {"message": message})
    problem = InitErrorDetails(type=error, loc=location, input=found)
    raise ValidationError.from_exception_data("kind", [problem])
