"""How much memory this process has had at most."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["begin_peak", "needs_peak", "peak"]

_CLEAR = Path("/proc/self/clear_refs")

needs_peak = pytest.mark.skipif(not _CLEAR.exists(), reason="the peak of memory is Linux's to tell")


def begin_peak() -> int:
    """Forget the peak so far; the bytes that the process has now."""
    _CLEAR.write_text("5")
    return peak()


def peak() -> int:
    """Bytes of memory that the process has had at most since :func:`begin_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the system does not say")
