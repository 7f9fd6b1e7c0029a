"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

__all__ = ["eventually"]


def eventually(is_so: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether something comes to be so within a time that is ample on a busy machine."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()
    return True
