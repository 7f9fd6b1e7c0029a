"""Hydra overrides, as our own commands take them."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.registry import GROUPS, kinds

__all__ = ["force_values"]


def force_values(overrides: Sequence[str]) -> list[str]:
    """Let ``a.b=1`` set a key that no file names, as ``++a.b=1`` does.

    Hydra refuses such a key without saying which there are; the config's model refuses it and
    does, and it knows the keys of a kind that has no YAML file of its own. What chooses an option
    of a group is left as it is.

    Raises:
        ConfigError: a value is a sweep, or a group is set to something that is no kind's name.
    """
    return [_forced(one) for one in OverridesParser.create().parse_overrides(list(overrides))]


def _forced(override: Override) -> str:
    key, line = override.key_or_group, str(override.input_line)
    if override.is_sweep_override():
        raise ConfigError(
            f"{key}: found several values, {override.get_value_string()!r}; expected one "
            "(a list is written [a,b], and text with a comma in quotes)",
            path=key,
        )
    is_change = override.type is OverrideType.CHANGE and override.package is None
    if not is_change or "/" in key or key.startswith("hydra."):
        return line
    if key not in GROUPS:
        return f"++{line}"
    value = override.value()
    if not isinstance(value, str | dict):
        allowed = ", ".join(kinds(key))
        raise ConfigError(
            f"{key}: found {override.get_value_string()!r}; allowed: {allowed}", path=key
        )
    return line
