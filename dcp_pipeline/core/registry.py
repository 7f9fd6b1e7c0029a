"""The kinds of every group, by name.

A kind is known by the Pydantic model of its config. Our own are named as ``"module:Class"`` and
imported when asked for. A third party adds one with `register`, or with an entry point::

    [project.entry-points."dcp_pipeline.storage"]
    tape = "my_package.config:TapeConfig"

which is loaded only when a config says ``kind: tape``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from difflib import get_close_matches
from importlib.metadata import EntryPoint, EntryPoints, entry_points

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig

__all__ = ["GROUPS", "TRANSFORM", "did_you_mean", "kinds", "model_of", "register", "unregister"]

GROUPS = (
    "stager",
    "planner",
    "coordination",
    "serialization",
    "layout",
    "storage",
    "background",
    "manager",
)
"""The groups of a pipeline, in the order in which they are shown."""

TRANSFORM = "transform"
"""The group of the rules in a config's list ``transforms``."""

_BUILT_IN: dict[str, dict[str, str]] = {
    "stager": {
        "host": "dcp_pipeline.staging.config:HostStagerConfig",
        "inplace": "dcp_pipeline.staging.config:InplaceStagerConfig",
        "pinned": "dcp_pipeline.staging.config:PinnedStagerConfig",
        "shared": "dcp_pipeline.staging.config:SharedStagerConfig",
    },
    "planner": {"default": "dcp_pipeline.planning.config:DefaultPlannerConfig"},
    "coordination": {
        "process_group": "dcp_pipeline.coordination.config:ProcessGroupConfig",
        "single_process": "dcp_pipeline.coordination.config:SingleProcessConfig",
    },
    "serialization": {
        "mega": "dcp_pipeline.serialization.config:MegaConfig",
        "safetensors": "dcp_pipeline.serialization.config:SafetensorsConfig",
        "torch_save": "dcp_pipeline.serialization.config:TorchSaveConfig",
    },
    "layout": {
        "dcp": "dcp_pipeline.layout.config:DcpLayoutConfig",
        "huggingface": "dcp_pipeline.layout.config:HuggingFaceLayoutConfig",
        "mega": "dcp_pipeline.layout.config:MegaLayoutConfig",
    },
    "storage": {
        "filesystem": "dcp_pipeline.storage.config:FileSystemConfig",
        "memory": "dcp_pipeline.storage.config:MemoryConfig",
    },
    "background": {
        "process": "dcp_pipeline.background.config:ProcessBackgroundConfig",
        "thread": "dcp_pipeline.background.config:ThreadBackgroundConfig",
    },
    "manager": {"default": "dcp_pipeline.manager.config:ManagerConfig"},
    TRANSFORM: {
        "cast": "dcp_pipeline.rules.config:CastConfig",
        "constant": "dcp_pipeline.rules.config:ConstantConfig",
        "drop": "dcp_pipeline.rules.config:DropConfig",
        "exclude": "dcp_pipeline.rules.config:ExcludeConfig",
        "fuse": "dcp_pipeline.rules.shape_config:FuseConfig",
        "include": "dcp_pipeline.rules.config:IncludeConfig",
        "keep": "dcp_pipeline.rules.config:KeepConfig",
        "pad": "dcp_pipeline.rules.shape_config:PadConfig",
        "rename": "dcp_pipeline.rules.config:RenameConfig",
        "resize": "dcp_pipeline.rules.shape_config:ResizeConfig",
        "reverse": "dcp_pipeline.rules.config:ReverseConfig",
        "rotary": "dcp_pipeline.rules.shape_config:RotaryConfig",
        "split": "dcp_pipeline.rules.shape_config:SplitConfig",
        "stack": "dcp_pipeline.rules.shape_config:StackConfig",
        "tie": "dcp_pipeline.rules.config:TieConfig",
        "transpose": "dcp_pipeline.rules.shape_config:TransposeConfig",
        "unstack": "dcp_pipeline.rules.shape_config:UnstackConfig",
    },
}

_registered: dict[tuple[str, str], type[KindConfig]] = {}


def register(group: str, kind: str, model: type[KindConfig]) -> None:
    """Add a kind to a group for the life of this process.

    Args:
        group: one of `GROUPS`, or ``"transform"``.
        kind: its name in a config.
        model: the model of its config, whose ``build`` makes the object.

    Raises:
        ConfigError: the name is taken, or ``model`` is no subclass of `KindConfig`.
    """
    _check_model(group, kind, model)
    if kind in _built_in(group):
        raise ConfigError(f"{group} kind {kind!r} is built in; register yours by another name")
    present = _registered.get((group, kind), model)
    if present is not model:
        raise ConfigError(f"{group} kind {kind!r} is already registered, as {present.__qualname__}")
    if kind in _entry_points(group):
        raise ConfigError(f"{group} kind {kind!r} is already provided by {_origin(group, kind)}")
    _registered[group, kind] = model


def unregister(group: str, kind: str) -> None:
    """Take back what `register` added; nothing happens if it was not there."""
    _registered.pop((group, kind), None)


def kinds(group: str) -> tuple[str, ...]:
    """Return the names of a group's kinds, sorted; no entry point is loaded.

    >>> kinds("serialization")
    ('mega', 'safetensors', 'torch_save')
    """
    ours = _built_in(group)
    added = (kind for of, kind in _registered if of == group)
    return tuple(sorted({*ours, *added, *_entry_points(group)}))


def model_of(group: str, kind: str) -> type[KindConfig]:
    """Return the config model of a kind.

    Raises:
        ConfigError: there is no such kind, two packages claim its name, or it does not load.
    """
    found = _entry_points(group).get(kind, ())
    if kind in _built_in(group):
        if found:
            raise ConfigError(
                f"{group} kind {kind!r} is built in, and {_origin(group, kind)} provides it too; "
                "that package must give its kind another name"
            )
        return _load_built_in(_built_in(group)[kind])
    if (group, kind) in _registered:
        return _registered[group, kind]
    if len({point.value for point in found}) > 1:
        raise ConfigError(f"{group} kind {kind!r} is provided twice: by {_origin(group, kind)}")
    if found:
        return _load_entry_point(group, found[0])
    allowed = kinds(group)
    raise ConfigError(
        f"found the kind {kind!r}; allowed: {', '.join(allowed)}{did_you_mean(kind, allowed)}"
    )


def did_you_mean(found: str, allowed: tuple[str, ...]) -> str:
    """Return ``"; did you mean 'x'?"`` when an allowed name is close to ``found``, else ``""``."""
    close = get_close_matches(found, allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _built_in(group: str) -> dict[str, str]:
    if group not in _BUILT_IN:
        raise ConfigError(f"found the group {group!r}; allowed: {', '.join(_BUILT_IN)}")
    return _BUILT_IN[group]


def _load_built_in(reference: str) -> type[KindConfig]:
    module, _, name = reference.partition(":")
    model: type[KindConfig] = getattr(importlib.import_module(module), name)
    return model


def _load_entry_point(group: str, point: EntryPoint) -> type[KindConfig]:
    try:
        model = point.load()
    except Exception as error:
        raise ConfigError(
            f"{group} kind {point.name!r} of {_origin(group, point.name)} does not load: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check_model(group, point.name, model)
    checked: type[KindConfig] = model
    return checked


def _check_model(group: str, kind: str, model: object) -> None:
    if not (isinstance(model, type) and issubclass(model, KindConfig)):
        raise ConfigError(
            f"{group} kind {kind!r} must be a subclass of dcp_pipeline.core.kind.KindConfig, "
            f"found {model!r}"
        )


def _entry_points(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    return _scan_entry_points(tuple(sys.path)).get(group, {})


@functools.lru_cache(maxsize=4)
def _scan_entry_points(_path: tuple[str, ...]) -> dict[str, dict[str, tuple[EntryPoint, ...]]]:
    """Index the installed entry points, once for each ``sys.path``: it reads every package's."""
    found = entry_points()
    return {group: _by_name(found.select(group=f"dcp_pipeline.{group}")) for group in _BUILT_IN}


def _by_name(points: EntryPoints) -> dict[str, tuple[EntryPoint, ...]]:
    return {name: tuple(points.select(name=name)) for name in points.names}


def _origin(group: str, kind: str) -> str:
    points = _entry_points(group)[kind]
    return " and ".join(
        f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in points
    )
