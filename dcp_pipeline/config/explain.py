"""What Pydantic found wrong, in words that name the key, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import FrozenModel, KindConfig
from dcp_pipeline.core.registry import GROUPS, TRANSFORM, did_you_mean, model_of
from dcp_pipeline.rules.config import DeclaredCast

__all__ = ["explain", "show", "validate"]

_Location = tuple[int | str, ...]

_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda _: "expected an integer",
    "int_from_float": lambda _: "expected an integer",
    "float_type": lambda _: "expected a number",
    "finite_number": lambda _: "expected a finite number",
    "bool_type": lambda _: "expected true or false",
    "string_type": lambda _: "expected text",
    "string_too_short": lambda _: "expected text that is not empty",
    "tuple_type": lambda _: "expected a list",
    "dict_type": lambda _: "expected a mapping",
    "model_type": lambda _: "expected a mapping",
    "too_short": lambda context: f"expected at least {context['min_length']} of them",
    "greater_than": lambda context: f"expected more than {context['gt']:g}",
    "greater_than_equal": lambda context: f"expected at least {context['ge']:g}",
    "less_than_equal": lambda context: f"expected at most {context['le']:g}",
}


def validate(data: Mapping[str, Any], prefix: str = "") -> PipelineConfig:
    """Make a config of plain data.

    Args:
        data: the config's keys and values.
        prefix: dotted path at which the user wrote them, such as ``"checkpoint"``.

    Raises:
        ConfigError: with one line for everything that is wrong.
    """
    try:
        return PipelineConfig.model_validate(dict(data))
    except ValidationError as error:
        raise explain(error, data, prefix) from None


def explain(
    error: ValidationError,
    data: Mapping[str, Any],
    prefix: str = "",
    header: type[FrozenModel] | None = None,
) -> ConfigError:
    """Turn Pydantic's error about ``data`` into ours, whose ``path`` is that of the first line.

    Args:
        error: of a config, or of ``header``.
        data: what the user wrote.
        prefix: dotted path at which the user wrote it.
        header: the model of a recipe's header, where the error is about that.
    """
    found = [(_path(line["loc"], prefix), _sentence(line, data, header)) for line in error.errors()]
    lines = [f"{path}: {sentence}" if path else sentence for path, sentence in found]
    message = lines[0]
    if len(lines) > 1:
        message = "\n  ".join([f"{len(lines)} problems in the config:", *lines])
    return ConfigError(message, path=found[0][0])


def show(value: object) -> str:
    """Write a value as a YAML file would, shortened.

    >>> show(True), show(None), show("host"), show([1, "a"])
    ('true', 'null', "'host'", "[1, 'a']")
    """
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _path(location: _Location, prefix: str) -> str:
    """Write a location as an override would: ``casts[0].keys``."""
    path = prefix
    for part in location:
        step = f"[{part}]" if isinstance(part, int) else f".{part}"
        path += step
    return path.removeprefix(".")


def _sentence(line: ErrorDetails, data: Mapping[str, Any], header: type[FrozenModel] | None) -> str:
    kind, context, value = line["type"], line.get("ctx", {}), line["input"]
    if kind == "extra_forbidden":
        return _unknown_key(line["loc"], data) if header is None else _unknown(line["loc"], header)
    if kind == "missing":
        return "missing; it has to be given"
    if kind == "config":
        return line["msg"]
    if kind == "literal_error":
        return f"found {show(value)}; {_allowed(context['expected'], value)}"
    if kind in _EXPECTED:
        return f"found {show(value)}; {_EXPECTED[kind](context)}"
    message = line["msg"].removeprefix("Value error, ")
    if isinstance(value, Mapping):
        return message
    return f"found {show(value)}; {message[:1].lower()}{message[1:]}"


def _allowed(expected: str, value: object) -> str:
    names = tuple(name.strip("'") for name in expected.replace(" or ", ", ").split(", "))
    allowed = f"allowed: {', '.join(names)}"
    if isinstance(value, str):
        return allowed + did_you_mean(value, names)
    if isinstance(value, bool):
        words = "on, yes and true" if value else "off, no and false"
        return f"{allowed} (YAML reads a bare {words} as the boolean {show(value)})"
    if value is None and "none" in names:
        return f"{allowed} (null is not the word none)"
    return allowed


def _unknown(location: _Location, model: type[BaseModel]) -> str:
    *above, last = location
    for step in above:
        annotation = model.model_fields[str(step)].annotation
        model = next(
            part
            for part in (annotation, *get_args(annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        )
    known = tuple(model.model_fields)
    return f"unknown key; it takes: {', '.join(known)}{did_you_mean(str(last), known)}"


def _unknown_key(location: _Location, data: Mapping[str, Any]) -> str:
    *above, last = location
    key, owner, known = str(last), "a config", tuple(PipelineConfig.model_fields)
    if above and above[0] == "casts":
        owner, known = "a cast", tuple(DeclaredCast.model_fields)
    elif above and above[0] in GROUPS:
        return _unknown_key_of_kind(str(above[0]), key, data)
    elif above:
        rule: Any = data
        for step in above:
            rule = rule[step]
        kind = rule["kind"]
        owner, known = f"the rule {kind}", _fields_of(model_of(TRANSFORM, kind))
    return f"unknown key; {owner} takes: {', '.join(known)}{did_you_mean(key, known)}"


def _unknown_key_of_kind(group: str, key: str, data: Mapping[str, Any]) -> str:
    default: KindConfig = PipelineConfig.model_fields[group].get_default(call_default_factory=True)
    kind = data[group].get("kind", default.kind)
    known = _fields_of(model_of(group, kind))
    takes = f"{group}={kind} takes " + (f"the keys {', '.join(known)}" if known else "no keys")
    if key in _fields_of(type(default)):
        return (
            f"a key of {group}={default.kind}, which is not chosen; {takes} "
            f"(where a recipe sets it, ~{group}.{key} takes it out)"
        )
    return f"unknown key; {takes}{did_you_mean(key, known)}"


def _fields_of(model: type[KindConfig]) -> tuple[str, ...]:
    return tuple(name for name in model.model_fields if name != "kind")
