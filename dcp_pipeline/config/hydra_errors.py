"""What Hydra and OmegaConf found wrong, in words that name the key and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from dcp_pipeline.config.places import Primary
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.registry import GROUPS, did_you_mean

__all__ = ["hydra_errors"]

_NO_OVERRIDE = re.compile(r"Could not (?:override|append|delete)[^']*'([^'\s]+)'")


@contextmanager
def hydra_errors(primary: Primary | None = None) -> Iterator[None]:
    """Raise `ConfigError` where the block raises an error of Hydra, OmegaConf or YAML.

    Args:
        primary: the config being composed, to be named where an error is about the file.
    """
    try:
        yield
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"a config names itself in its defaults list{_seen(primary)}") from None
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise _translated(error, primary) from None


def _translated(error: Exception, primary: Primary | None) -> ConfigError:
    # Hydra wraps OmegaConf's errors in one of its own without a message.
    cause = error.__cause__ if not str(error) and error.__cause__ else error
    if isinstance(cause, MissingConfigException):
        return _missing_config(cause)
    if isinstance(cause, OverrideParseException):
        problem = _first_line(cause)
        path = re.split(r"[=@\s]", cause.override.lstrip("+~"), maxsplit=1)[0]
        return ConfigError(f"cannot read the override {cause.override!r}: {problem}", path=path)
    if isinstance(cause, OmegaConfBaseException):
        return _unresolved(cause)
    if isinstance(cause, YAMLError):
        return ConfigError(f"cannot read the YAML{_seen(primary)}: {_one_line(cause)}")
    return _refused(cause, primary)


def _seen(primary: Primary | None) -> str:
    return f" (composing {primary.folder / primary.name}.yaml)" if primary else ""


def _missing_config(error: MissingConfigException) -> ConfigError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = tuple(error.options or ())
    if not group:
        return ConfigError(f"found no config {option!r} that a defaults list names")
    hint = did_you_mean(option, options)
    allowed = f"; allowed: {', '.join(options)}" if options else "; there is no such group"
    return ConfigError(f"{group}: found the kind {option!r}{allowed}{hint}", path=group)


def _unresolved(error: OmegaConfBaseException) -> ConfigError:
    path = error.full_key or ""
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{path}: found ???; it has to be given", path=path)
    problem = _first_line(error)
    if isinstance(error, InterpolationResolutionError):
        problem = f"cannot resolve the interpolation: {problem}"
    return ConfigError(f"{path}: {problem}" if path else problem, path=path)


def _refused(error: BaseException, primary: Primary | None) -> ConfigError:
    problem = _first_line(error)
    match = _NO_OVERRIDE.search(problem)
    if match is None:
        return ConfigError(f"{_one_line(error)}{_seen(primary)}")
    path = match[1]
    if path in GROUPS:
        return ConfigError(
            f"{path}: the recipe's defaults list does not name this group; write "
            "'defaults: [pipeline, _self_]' in it",
            path=path,
        )
    if "/" in path:
        allowed = ", ".join(GROUPS)
        hint = did_you_mean(path, GROUPS)
        return ConfigError(f"{path}: unknown group; allowed: {allowed}{hint}", path=path)
    return ConfigError(f"{path}: {problem}", path=path)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]
