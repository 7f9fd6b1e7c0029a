"""The priority of background work."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading

__all__ = ["lower_priority"]

logger = logging.getLogger("dcp_pipeline")

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_OF_THIS_THREAD = 1  # IOPRIO_WHO_PROCESS, with number 0
_CLASSES = {"low": (2 << 13) | 7, "idle": 3 << 13}
"""Best effort, the lowest of its eight levels; and idle. See ioprio_set(2)."""


def lower_priority(nice: int, io_priority: str | None) -> None:
    """Lower the priority of this thread and of the threads that it will start.

    Args:
        nice: added to the priority number, as ``nice(1)``.
        io_priority: ``idle``, ``low`` or ``None``, as ``ionice(1)``; nothing but Linux has it.
    """
    if nice:
        try:
            # On Linux a thread has a priority of its own; elsewhere it is the whole process's.
            if sys.platform == "linux":
                thread = threading.get_native_id()
                now = os.getpriority(os.PRIO_PROCESS, thread)
                os.setpriority(os.PRIO_PROCESS, thread, min(19, now + nice))
        except OSError as error:
            logger.warning("the priority of the background could not be lowered: %s", error)
    if io_priority is not None:
        _lower_io_priority(io_priority)


def _lower_io_priority(name: str) -> None:
    number = _IOPRIO_SET.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        logger.warning("this system has no I/O priorities that are known here")
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _OF_THIS_THREAD, 0, _CLASSES[name]) != 0:
        reason = os.strerror(ctypes.get_errno())
        logger.warning("the I/O priority of the background could not be lowered: %s", reason)
