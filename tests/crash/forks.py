"""Processes forked from one that has torch imported, which end by themselves or are ended."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Ended", "Fork", "fork"]


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        how: ``ok``, ``error``, ``killed``, or ``hung``: it did not end in time and was made to.
        value: what the action returned.
        error: names of the classes of what it raised, then the text.
        trace: the traceback.
    """

    how: str
    value: Any = None
    error: tuple[str, ...] = ()
    trace: str = ""


class Fork:
    """A forked process that sends back one JSON value."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def wait(self, seconds: float) -> Ended:
        """Wait for its end; kill it after ``seconds``."""
        deadline = time.monotonic() + seconds
        data = b""
        has_hung = False
        while True:
            left = deadline - time.monotonic()
            if not has_hung and (left <= 0 or not select.select([self._pipe], [], [], left)[0]):
                has_hung = True
                os.kill(self.pid, signal.SIGKILL)
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                break
            data += piece
        os.close(self._pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if has_hung:
            return Ended("hung")
        if code == -signal.SIGKILL:
            return Ended("killed")
        if code or not data:
            return Ended("error", error=(f"exit code {code}",))
        return Ended(**json.loads(data))


def fork(action: Callable[[], Any]) -> Fork:
    """Run ``action`` in a fork of this process, which ends without any cleaning up."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Fork(pid, reading)
    try:
        os.close(reading)
        os.write(writing, json.dumps(_outcome(action)).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _outcome(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"how": "ok", "value": action()}
    except BaseException as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        trace = "".join(traceback.format_exception(error))[-4000:]
        return {"how": "error", "error": [*names, str(error)], "trace": trace}
