"""What the config of every kind has in common, torch-free."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["Bytes", "FrozenModel", "KindConfig", "Names", "parse_bytes"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}iB"] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object) -> object:
    """Turn ``"64KiB"``, ``"8MiB"`` or ``"1GB"`` into a number of bytes; leave other types alone.

    ``KiB`` counts in 1024, ``KB`` in 1000. A bare ``K`` is refused, since it could mean either.

    >>> parse_bytes("64KiB"), parse_bytes("1GB"), parse_bytes("1.5MiB"), parse_bytes(4096)
    (65536, 1000000000, 1572864, 4096)

    Raises:
        ValueError: the text is no size, or no whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        units = ", ".join(unit for unit in _UNITS if unit)
        raise ValueError(f"expected bytes as an integer, or a number with one of {units}")
    size = Decimal(match[1]) * _UNITS[match[2]]
    if size != int(size):
        raise ValueError("expected a whole number of bytes")
    return int(size)


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
"""A number of bytes; a config may write it as ``"64KiB"``, ``"8MiB"`` or ``"1GB"``."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""Texts in a row; YAML and JSON write them as a list."""


class FrozenModel(BaseModel):
    """A model that takes no unknown key, converts no value, and never changes."""

    # A field may have another name in YAML, where that is a word of Python: `from`.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True,
        serialize_by_alias=True,
    )  # fmt: skip


class KindConfig(FrozenModel):
    """The config of one kind: its fields, and how the object it describes is made.

    A subclass narrows ``kind`` to its own name and imports its implementation inside ``build``,
    so that a config is read, checked and shown without torch::

        class TapeConfig(KindConfig):
            kind: Literal["tape"] = "tape"
            drive: int = 0

            def build(self) -> TapeStorage:
                from my_package.tape import TapeStorage

                return TapeStorage(drive=self.drive)
    """

    works_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Group -> the kinds of it that this kind can be combined with; a group left out takes any."""

    kind: str

    @abstractmethod
    def build(self) -> Any:
        """Make the object that this config describes."""
