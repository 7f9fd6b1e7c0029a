"""The settings of one manager: the config's, and what its caller says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcp_pipeline.config.explain import validate
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.manager.config import ManagerConfig

__all__ = ["settings_of"]


def settings_of(config: KindConfig, changes: Mapping[str, Any]) -> ManagerConfig:
    """``config`` with ``changes``.

    >>> settings_of(ManagerConfig(keep_last=3), {"keep_every": 100}).keep_last
    3

    Raises:
        ConfigError: naming each key that is wrong.
    """
    settings = validate({"manager": {**config.model_dump(), **changes}}).manager
    if not isinstance(settings, ManagerConfig):
        raise ConfigError(f"expected a config of the manager, found {settings!r}", "manager")
    return settings
