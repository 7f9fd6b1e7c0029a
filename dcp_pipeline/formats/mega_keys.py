"""The keys of MEGA's metadata that this package adds, and how the names of values become keys."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BOXES_KEY",
    "FORMAT",
    "FORMAT_KEY",
    "STATE_KEY",
    "is_value",
    "key_of_value",
    "value_key",
]

FORMAT_KEY: Final = "dcp_pipeline.format"
"""In every file that this package writes: the version of what it adds to the format."""
FORMAT: Final = 1
STATE_KEY: Final = "dcp_pipeline.state"
"""JSON: the keys of the state and their paths, and what of it is empty."""
BOXES_KEY: Final = "dcp_pipeline.boxes"
"""JSON: of each tensor that is a part of another one, whose, where in it, and the whole's sizes."""

_VALUE: Final = "dcp_pipeline.value:"
_RESERVED: Final = ("mega.", "megakv.", "dcp_pipeline.")
_ALIGNMENT: Final = "general.alignment"


def value_key(name: str) -> str:
    """The key of metadata under which a value of the state is kept.

    >>> value_key("step"), value_key("mega.step")
    ('step', 'dcp_pipeline.value:mega.step')
    """
    return f"{_VALUE}{name}" if name == _ALIGNMENT or name.startswith(_RESERVED) else name


def is_value(key: str) -> bool:
    """Whether a key of metadata is a value, not something that the format keeps for itself."""
    return key.startswith(_VALUE) or not (key == _ALIGNMENT or key.startswith(_RESERVED))


def key_of_value(key: str) -> str:
    """The inverse of :func:`value_key`."""
    return key.removeprefix(_VALUE)
