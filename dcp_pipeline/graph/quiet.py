"""Runs without the cyclic garbage collector getting in between."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_collections"]

_LOCK = threading.Lock()
_inside = 0


@contextmanager
def without_collections() -> Iterator[None]:
    """Put off full garbage collections while many small objects are made.

    Each would look at every object of the training job, several times during a save of tens of
    thousands of tensors. Nested and concurrent uses end with the last one; a collector that the
    program itself has switched off stays off.
    """
    global _inside
    with _LOCK:
        was_enabled = _inside > 0 or gc.isenabled()
        _inside += was_enabled
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            with _LOCK:
                _inside -= 1
                if _inside == 0:
                    gc.enable()
