"""Which of many parametrizations run every time; the others are ``slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["mostly_slow", "slow"]


def slow(*values: Any) -> Any:
    """A set of parameters that runs in ``make test-all`` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


def mostly_slow(found: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """All that are ``found``, in their order; only those ``kept`` run every time."""
    found, kept = list(found), list(kept)
    unknown = [values for values in kept if values not in found]
    assert not unknown, f"there are no such parameters: {unknown}"
    return [
        values if values in kept else slow(*values) if isinstance(values, tuple) else slow(values)
        for values in found
    ]
