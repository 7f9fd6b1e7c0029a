"""One save under way: who takes part, where it goes, and what has to be undone if it fails."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import CheckpointError, CoordinationError, PeerFailedError
from dcp_pipeline.core.liveness import ProcessIdentity, forget, give_up
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.resumption import Resumption
from dcp_pipeline.pipelines.values import CoordinatorPlan
from dcp_pipeline.storage.base import Directory

__all__ = ["Heartbeat", "SaveJob"]

logger = logging.getLogger("dcp_pipeline")

_ATTEMPTS = 2


@dataclass
class SaveJob:
    """State of one save on one rank.

    Attributes:
        parts: what the config built.
        coordinator: the ranks that take part.
        directory: where the checkpoint goes.
        save_id: 32 hexadecimal digits, once agreed.
        lasting_id: the save id of a conversion that can be taken up again; empty for a save.
        resumption: what this rank of such a conversion has done already.
        written: names of the files that this rank has made.
        may_delete: whether this rank may still delete them: until the coordinator may have
            committed them.
        has_tried_to_commit: on the coordinator, whether the commit record may be replaced by now.
        is_given_up: on the coordinator, whether the commit record will never be replaced.
        notes: kept in the manifest, as plain JSON data.
        guard: called on the coordinator before anything is written and again right before the
            commit; what it raises fails the save. Pickled for a background process.
        empty: containers of this rank's state that held nothing.
        is_tidy: on the coordinator, whether nothing is left over that only the marker names.
        slowest_writer: on the coordinator, the rank whose write took longest, and the seconds.
        heartbeat, plan, committed: on the coordinator only.
    """

    parts: Parts
    coordinator: Coordinator
    directory: Directory
    notes: Mapping[str, Any] = field(default_factory=dict)
    guard: Callable[[], None] | None = None
    save_id: str = ""
    lasting_id: str = ""
    resumption: Resumption | None = None
    written: list[str] = field(default_factory=list)
    may_delete: bool = True
    has_tried_to_commit: bool = False
    is_given_up: bool = False
    is_tidy: bool = False
    slowest_writer: tuple[int, float] | None = None
    empty: list[tuple[Path, str]] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    plan: CoordinatorPlan | None = None
    committed: Manifest | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_commit(self) -> None:
        """On the coordinator, right before the commit record is replaced.

        Raises:
            CoordinationError: the save was given up, from another thread.
        """
        with self._lock:
            if self.is_given_up:
                raise CoordinationError("the save was given up")
            self.has_tried_to_commit = True

    def give_up(self) -> bool:
        """On the coordinator: commit no more, unless that has begun; whether it has not."""
        with self._lock:
            self.is_given_up = self.is_given_up or not self.has_tried_to_commit
            return self.is_given_up

    def ask_guard(self) -> None:
        """Call the guard, if there is one."""
        if self.guard is not None:
            self.guard()

    def again(self, coordinator: Coordinator) -> SaveJob:
        """The same save, to be tried once more."""
        return SaveJob(
            self.parts, coordinator, self.directory, self.notes, self.guard, empty=self.empty
        )

    def check_peers(self) -> None:
        """Raise if another rank has failed meanwhile."""
        if self.coordinator.peer_failed():
            raise PeerFailedError(f"rank {self.coordinator.rank} stopped: another rank has failed")

    def resumable(self) -> Resumption | None:
        """What this rank has done already, once the save id is agreed; ``None`` for a save."""
        if self.lasting_id and self.resumption is None:
            rank = self.coordinator.rank
            self.resumption = Resumption(self.directory, self.save_id, rank)
        return self.resumption

    def abandon(self) -> None:
        """Remove what this rank has written for a save that failed; in doubt leave it."""
        try:
            for name in self.written if self.may_delete and not self.lasting_id else ():
                # One that cannot be removed is no reason to leave the others.
                _remove(self.directory, name)
        finally:
            if self.heartbeat is not None:
                self.heartbeat.stop(remove=self.may_delete or self.is_tidy)

    def finish(self) -> None:
        """Remove the marker of a save that is committed."""
        if self.resumption is not None:
            self.resumption.forget()
        if self.heartbeat is not None:
            self.heartbeat.stop(remove=True)


class Heartbeat:
    """The marker that says that a save is under way, renewed while it is.

    Nothing is made before :meth:`start`, so that whoever stops it can hold it by then. Once nobody
    holds it any more, it has stopped.

    Args:
        directory: where the checkpoint goes.
        name: of the marker.
        stale_after: seconds after which others take a marker that is not renewed for dead.
        replaces: files to delete after the commit which nothing else tells to be left over.
    """

    def __init__(
        self, directory: Directory, name: str, stale_after: float, replaces: Iterable[str] = ()
    ) -> None:
        self._directory = directory
        self._name = name
        self._stale_after = stale_after
        self._replaces = sorted(replaces)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        # An interrupt may come where nobody can stop it by hand.
        self._finalizer = weakref.finalize(self, _let_go, self._stopped, name)
        self._finalizer.atexit = False

    def _content(self) -> bytes:
        return ProcessIdentity.current().encode(
            started_at=time.time(), stale_after=self._stale_after, replaces=self._replaces
        )

    def start(self) -> None:
        """Write the marker and renew it from now on."""
        # A marker without content would say nothing of its owner, and outlive it for long.
        self._directory.put_whole(self._name, self._content())
        self._directory.sync()
        self._thread = threading.Thread(
            target=_renew,
            args=(self._directory, self._name, self._stale_after / 4, self._stopped),
            name="dcp_pipeline heartbeat",
            daemon=True,
        )
        self._thread.start()

    def note(self, names: Iterable[str]) -> None:
        """Let the marker name further files that would be nobody's if this save was killed."""
        self._replaces = sorted({*self._replaces, *names})
        self._directory.put_whole(self._name, self._content())

    def stop(self, remove: bool) -> None:
        """End the renewals; ``remove`` takes the marker away too."""
        # First of all, so that a marker that stays for any reason names nobody who is alive.
        self._finalizer()
        if self._thread is not None:
            # It may have been interrupted while it was being started.
            with contextlib.suppress(RuntimeError):
                self._thread.join()
        if remove and _remove(self._directory, self._name):
            forget(self._name)


def _renew(directory: Directory, name: str, interval: float, stopped: threading.Event) -> None:
    while not stopped.wait(interval):
        try:
            directory.renew(name)
        except (CheckpointError, OSError) as error:
            logger.warning("the marker %s could not be renewed: %s", name, error)


def _let_go(stopped: threading.Event, name: str) -> None:
    give_up(name)
    stopped.set()


def _remove(directory: Directory, name: str) -> bool:
    """Remove a file if that is possible, also where it fails at first."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(CheckpointError, OSError):
            directory.delete([name])
            return True
    return False
