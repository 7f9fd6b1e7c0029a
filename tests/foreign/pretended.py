"""Modules of packages that are not installed, for as long as their classes are pickled."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pretended"]


@contextmanager
def pretended(name: str, *classes: type) -> Iterator[None]:
    """Let ``classes`` be those of the module ``name``, meanwhile."""
    parts = name.split(".")
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    before = {one: sys.modules.get(one) for one in names}
    homes = [one.__module__ for one in classes]
    for one in names:
        sys.modules[one] = types.ModuleType(one)
    for one in classes:
        setattr(sys.modules[name], one.__name__, one)
        one.__module__ = name
    try:
        yield
    finally:
        for one, home in zip(classes, homes, strict=True):
            one.__module__ = home
        for one, module in before.items():
            if module is None:
                del sys.modules[one]
            else:
                sys.modules[one] = module
