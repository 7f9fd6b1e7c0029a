"""What is not as it was when a checkpoint was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["changed"]

_ABSENT = object()


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The leaves that differ, as ``key: before -> after``, by dotted key.

    >>> changed({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 1, "c": 3}, "e": True})
    ['a.c: 2 -> 3', 'd: [1] -> absent', 'e: absent -> True']
    """
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        f"{key}: {_shown(old.get(key, _ABSENT))} -> {_shown(new.get(key, _ABSENT))}"
        for key in sorted({*old, *new})
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else str(value)
