"""What the fields of the rules' configs are made of, torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.kind import Names
from dcp_pipeline.rules.patterns import Pattern

__all__ = ["Dtype", "Globs", "Integers", "KeyPattern", "Number", "Patterns", "same_places"]


def _dtype(name: str) -> str:
    if name not in ITEM_SIZES:
        raise ValueError(f"allowed: {', '.join(ITEM_SIZES)}")
    return name


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_float(value: object) -> object:
    return float(value) if type(value) is int else value


Dtype = Annotated[str, AfterValidator(_dtype)]
Globs = Annotated[Names, Field(min_length=1)]
Integers = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tuple), Field(max_length=64)
]
Number = Annotated[float, BeforeValidator(_as_float)]


def _pattern(text: str) -> str:
    Pattern(text)
    return text


KeyPattern = Annotated[str, Field(min_length=1), AfterValidator(_pattern)]
"""A key with places in it, as :class:`~dcp_pipeline.rules.patterns.Pattern` reads it."""

Patterns = Annotated[tuple[KeyPattern, ...], BeforeValidator(_as_tuple)]


def same_places(several: list[str], one: str, but: str | None = None) -> None:
    """Raise unless all patterns have the same places, but for one that only ``several`` have."""
    wanted = set(Pattern(one).places)
    if but is not None and but in wanted:
        raise ValueError(f"{one!r} still has the place {{{but}}} that is counted over")
    for text in several:
        places = set(Pattern(text).places)
        if but is not None and but not in places:
            raise ValueError(f"{text!r} has no place {{{but}}} to count over")
        if places - {but} != wanted:
            raise ValueError(f"{text!r} and {one!r} do not have the same places")
