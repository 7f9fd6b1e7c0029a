"""Whose a root directory is: a mark in it keeps a second job out.

The mark is renewed while the run lives. Whoever comes later and can look at the process sees that
it is gone, or else watches for renewals. A run that was stopped for so long that another has taken
over finds that out before it commits anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Final

from dcp_pipeline.core.errors import CheckpointError, ConcurrentSaveError, MissingFileError
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.storage.base import Directory

__all__ = ["RUN", "Claim", "Fence"]

RUN: Final = ".run.json"

logger = logging.getLogger("dcp_pipeline")

_ATTEMPTS = 5
_LOOKS_PER_HEARTBEAT = 4
_UNKNOWN_HEARTBEAT = 10.0
_CLOCK = 0.005
"""Seconds by which the same moment may seem to differ from one look to the next."""


@dataclass(frozen=True)
class Fence:
    """Raises once the root is another run's; asked before a save writes, and before it commits.

    Attributes:
        storage: config of the storage; a background process builds its own.
        location: the root.
        mark: what has to be in it.
    """

    storage: KindConfig
    location: str
    mark: bytes

    def __call__(self) -> None:
        """Look at the mark.

        Raises:
            ConcurrentSaveError: it is another's, or gone.
        """
        storage = self.storage.build()
        try:
            found = _read(storage.open(self.location))
        finally:
            storage.close()
        if found != self.mark:
            raise ConcurrentSaveError(_lost(self.location, found))


class Claim:
    """The mark of this run in a root; the coordinator alone makes and renews it.

    Managers of one process share it: they are of one job.

    Args:
        directory: the root.
        heartbeat_seconds: between two renewals.
        takeover_seconds: how long another's mark is watched.

    Attributes:
        run: id of the run, 32 hexadecimal digits.
        mark: what lies in the root; empty until the claim is made.
    """

    def __init__(
        self, directory: Directory, heartbeat_seconds: float, takeover_seconds: float
    ) -> None:
        self.run = uuid.uuid4().hex
        self.mark = b""
        self._directory = directory
        self._heartbeat_seconds = heartbeat_seconds
        self._takeover_seconds = takeover_seconds
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_own = False
        self._process = os.getpid()

    def hold(self) -> None:
        """Make the root this run's, or see that it still is.

        Raises:
            ConcurrentSaveError: it is another run's, which lives; the message names its process.
            StorageError: the mark cannot be written.
        """
        for _ in range(_ATTEMPTS):
            found = _read(self._directory)
            if self.mark and found == self.mark:
                return
            if self.mark and found is not None:
                raise ConcurrentSaveError(_lost(self._directory.location, found))
            if self._is_own:
                logger.warning(
                    "%s is gone from %s: was the directory removed, or made anew?",
                    RUN,
                    self._directory.location,
                )
            self._stop()
            self.mark, self._is_own = b"", False
            if found is not None and ProcessIdentity.parse(found) == ProcessIdentity.current():
                return self._keep(found)
            if found is not None and not self._is_dead(found):
                continue
            with contextlib.suppress(ConcurrentSaveError):  # another was quicker: look again
                return self._take(found)
        raise ConcurrentSaveError(
            f"{self._directory.location} could not be claimed: other runs keep taking it"
        )

    def _take(self, found: bytes | None) -> None:
        mark = ProcessIdentity.current().encode(
            run=self.run, started_at=time.time(), heartbeat_seconds=self._heartbeat_seconds
        )
        self._directory.prepare()
        self._directory.commit(RUN, mark, found, [])
        self._is_own = True
        if found is not None:
            who = _owner(found)
            logger.info("%s is taken over from %s", self._directory.location, who)
        self._keep(mark)

    def _keep(self, mark: bytes) -> None:
        """Renew a mark from here on."""
        self.mark = mark
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_renew,
            args=(self._directory, mark, self._heartbeat_seconds, self._stopped),
            name="dcp_pipeline run",
            daemon=True,
        )
        self._thread.start()

    def _is_dead(self, found: bytes) -> bool:
        """Watch a mark; whether its run is gone, or else it is another one by now.

        Raises:
            ConcurrentSaveError: it is renewed.
        """
        owner = ProcessIdentity.parse(found)
        heartbeat = _heartbeat(found)
        deadline = time.monotonic() + max(self._takeover_seconds, 3 * heartbeat)
        written = self._written()
        while written is not None and time.monotonic() < deadline:
            if owner is not None and owner.is_gone():
                return True
            time.sleep(min(heartbeat, self._takeover_seconds) / _LOOKS_PER_HEARTBEAT)
            now = self._written()
            if _read(self._directory) != found:
                return False
            if now is not None and now > written + _CLOCK:
                raise ConcurrentSaveError(
                    f"{self._directory.location} belongs to {_owner(found)}, which is alive: give"
                    " each job a root of its own, or end the other one first"
                )
            written = now
        return written is not None

    def _written(self) -> float | None:
        """When the mark was renewed, by this host's clock; ``None`` once it is gone."""
        try:
            return time.time() - self._directory.age(RUN)
        except MissingFileError:
            return None

    def release(self) -> None:
        """Take the mark away, if it is this run's."""
        if self._process != os.getpid():
            return  # a child that was forked from the run does not own it
        self._stop()
        if not self._is_own:
            return
        self._is_own = False
        try:
            if _read(self._directory) == self.mark:
                self._directory.delete([RUN])
        except (CheckpointError, OSError) as error:
            logger.warning("%s could not be removed: %s", RUN, error)

    def _stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _renew(directory: Directory, mark: bytes, seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(seconds):
        try:
            if _read(directory) != mark:
                return
            directory.renew(RUN)
        except (CheckpointError, OSError) as error:
            logger.warning("%s could not be renewed: %s", RUN, error)


def _read(directory: Directory) -> bytes | None:
    try:
        return directory.read(RUN)
    except MissingFileError:
        return None


def _heartbeat(mark: bytes) -> float:
    try:
        return min(max(float(json.loads(mark)["heartbeat_seconds"]), 0.01), 600.0)
    except (ValueError, KeyError, TypeError):
        return _UNKNOWN_HEARTBEAT


def _owner(mark: bytes) -> str:
    owner = ProcessIdentity.parse(mark)
    return f"process {owner.pid} on {owner.host}" if owner is not None else "an unknown run"


def _lost(location: str, found: bytes | None) -> str:
    if found is None:
        return f"{RUN} is gone from {location}: another run has had it, or it was removed"
    return (
        f"{location} belongs to {_owner(found)} now: it has taken this run for dead. Nothing was"
        " committed; end one of the two, or give each a root of its own"
    )
