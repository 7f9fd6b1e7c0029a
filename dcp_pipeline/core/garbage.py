"""Python's garbage collector, kept from walking over everything again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """For a short stretch that makes many objects and no cycles.

    Tens of thousands of new objects set off collections of the whole heap, which found nothing and
    took as long as all the rest while training waited.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
