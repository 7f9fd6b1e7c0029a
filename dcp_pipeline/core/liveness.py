"""Whether the process that left a marker file is still there."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Final

__all__ = ["ProcessIdentity", "forget", "give_up", "is_given_up"]

MARK_BYTES: Final = 16 << 20
"""More than a marker or a lock ever has; what is longer is not read."""

_MAX_PID: Final = (1 << 31) - 1
_GIVEN_UP: set[str] = set()


def give_up(mark: str) -> None:
    """Note that this process does not stand behind a mark of its own any more.

    Such a mark names a process that is alive, so it would keep others out for as long.

    Args:
        mark: what tells it from all others: a marker's name, a lock's text.
    """
    _GIVEN_UP.add(mark)


def forget(mark: str) -> None:
    """Note that a mark that was given up is not there any more."""
    _GIVEN_UP.discard(mark)


def is_given_up(mark: str) -> bool:
    """Whether this process has left a mark behind that it could not remove."""
    return mark in _GIVEN_UP


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When a process started, in the kernel's clock ticks; empty where that cannot be told."""
    stat = _read(f"/proc/{pid}/stat")
    return stat.rpartition(")")[2].split()[19] if stat else ""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from later ones that get the same number.

    Attributes:
        host, boot: the machine, and which of its starts.
        namespace: the process-id namespace; containers of one machine differ in it.
        pid, started: the process.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        """This process."""
        return _identify(os.getpid())

    @classmethod
    def parse(cls, data: bytes) -> ProcessIdentity | None:
        """The identity in a marker file, ``None`` where it holds none."""
        try:
            record = json.loads(data)
            if type(record["pid"]) is not int or not 0 < record["pid"] <= _MAX_PID:
                return None
            return cls(
                host=str(record["host"]),
                boot=str(record["boot"]),
                namespace=str(record["namespace"]),
                pid=record["pid"],
                started=str(record["started"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def encode(self, **more: object) -> bytes:
        """A marker file's content."""
        return json.dumps(asdict(self) | more).encode()

    def is_gone(self) -> bool:
        """Whether this process is known to have ended; ``False`` when that cannot be told."""
        here = ProcessIdentity.current()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return bool(self.boot and here.boot)
        if self.namespace != here.namespace:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return bool(self.started) and _start_time(self.pid) != self.started


@lru_cache(maxsize=4)
def _identify(pid: int) -> ProcessIdentity:
    try:
        namespace = os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""
    except OSError:
        namespace = ""
    boot = _read("/proc/sys/kernel/random/boot_id")
    return ProcessIdentity(socket.gethostname(), boot, namespace, pid, _start_time(pid))
