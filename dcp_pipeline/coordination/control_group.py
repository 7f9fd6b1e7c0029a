"""The group that the ranks of a process group agree over, which is never shared with training."""

from __future__ import annotations

import hashlib
import re
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dcp_pipeline.coordination.asked_store import AskedStore
from dcp_pipeline.coordination.roll_call import LOST, Verdict
from dcp_pipeline.core.errors import CoordinationError, list_some

__all__ = ["NO_STORE", "ControlGroup", "control_group", "first_words"]

NO_STORE = (
    "the store of the process group does not answer: the process that hosts it, by default that of"
    " rank 0, has ended or was stopped"
)
_ASK_SECONDS = 2.0
_SPARE_SECONDS = 1.0


class ControlGroup:
    """A gloo group with the ranks of another group, and a store to look at between messages.

    Attributes:
        turn: number of the next save or load, the same on all ranks.
        lock: held during a round.
        is_broken: whether contact was lost, so that a new group is needed.
    """

    def __init__(self, group: Any, timeout: timedelta, name: str) -> None:
        self.timeout = timeout.total_seconds()
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        name = f"dcp_pipeline/{group.group_name} {self.ranks} {name}"
        self.group = _gloo_group(self.ranks, timeout, name)
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self.store = AskedStore(store, self.timeout)
        self.turn = 0
        self.lock = threading.Lock()
        self.is_broken = False

    def is_usable(self) -> bool:
        """Whether no rank has lost contact in an earlier turn, as far as this one can know."""
        if not self.is_broken:
            # This rank may have got through where another one did not. One that was lost in the
            # turn that is to come knows of no new group: this rank hears of it in that turn.
            text = self.store.ask(
                lambda store: store.get(LOST) if store.check([LOST]) else b"", _ASK_SECONDS
            )
            self.is_broken = bool(text) and Verdict.decode(text).turn < self.turn
        return not self.is_broken

    def take_turn(self) -> int:
        """The number of the save or load that begins."""
        self.turn += 1
        return self.turn - 1


def _gloo_group(ranks: list[int], timeout: timedelta, name: str) -> Any:
    """What ``new_group(use_local_synchronization=True)`` makes, under a name of our own.

    torch would take the number of groups that a rank is in for a part of the name, and ranks that
    are in other numbers of groups would never meet.
    """
    c10d = dist.distributed_c10d
    places = {rank: place for place, rank in enumerate(ranks)}
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        places[dist.get_rank()],
        ranks,
        c10d.Backend(c10d.Backend.GLOO),
        c10d._get_default_store(),
        c10d.GroupName(name),
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = places
    return group


class _Known:
    """The control groups of a process group."""

    def __init__(self) -> None:
        self.groups: dict[tuple[timedelta, bool], ControlGroup] = {}
        self.made: dict[tuple[timedelta, bool], int] = {}


_KNOWN: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
"""Groups live as long as the process group they were made for; making one takes a rendezvous."""

_CREATION = threading.Lock()


def control_group(group: Any, timeout: timedelta, background: bool) -> ControlGroup:
    """The control group of a process group, made where there is none that works.

    Raises:
        CoordinationError: not all ranks came.
    """
    with _CREATION:
        known = _KNOWN.setdefault(group, _Known())
        kind = timeout, background
        if kind not in known.groups or not known.groups[kind].is_usable():
            number = known.made.get(kind, 0) + 1
            of_kind = f"{timeout.total_seconds():g} {background}"
            arrivals = _Arrivals(group, of_kind, number)
            arrivals.note()
            try:
                known.groups[kind] = _made_in_time(group, timeout, f"{of_kind} {number}")
            except (RuntimeError, ValueError) as error:
                problem = f"{arrivals.problem(timeout.total_seconds())}: {first_words(error)}"
                raise CoordinationError(problem) from error
            known.made[kind] = number
        return known.groups[kind]


def _made_in_time(group: Any, timeout: timedelta, name: str) -> ControlGroup:
    """A new group; ``RuntimeError`` where it cannot be made in time.

    Made in a thread: a store whose host was stopped lets one wait for good.
    """
    made: list[ControlGroup] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            made.append(ControlGroup(group, timeout, name))
        except BaseException as error:
            errors.append(error)

    making = threading.Thread(target=make, name="dcp_pipeline meet", daemon=True)
    making.start()
    making.join(timeout.total_seconds() + _SPARE_SECONDS)
    if errors:
        raise errors[0]
    if not made:
        raise RuntimeError("the store does not answer")
    return made[0]


class _Arrivals:
    """Who has come to make a control group."""

    def __init__(self, group: Any, kind: str, number: int) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        name = hashlib.sha256(f"{self._ranks} {kind}".encode()).hexdigest()[:16]
        store = dist.PrefixStore(
            f"dcp_pipeline/coming/{name}", dist.distributed_c10d._get_default_store()
        )
        self._store = AskedStore(store, _ASK_SECONDS)
        self._rank = dist.get_rank(group)
        self._number = number

    def note(self) -> None:
        """Say that this rank comes; it stands there for good, also if not all do."""
        word = str(self._number)
        self._store.ask(lambda store: store.set(str(self._rank), word), _ASK_SECONDS)

    def problem(self, seconds: float) -> str:
        """A sentence on who did not come."""
        within = f"to the save or load within {seconds:g} s (coordination.timeout_seconds)"
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        late = [rank for rank in others if not self._has_come(rank)]
        if self._store.does_not_answer:
            return f"the ranks {self._ranks} did not all come {within}, and {NO_STORE}"
        if not late:
            return f"the ranks {self._ranks} did not all come {within}, or could not connect"
        ranks = f"rank {late[0]}" if len(late) == 1 else f"ranks {list_some(late)}"
        return f"{ranks} did not come {within}, having failed before, or never called it"

    def _has_come(self, rank: int) -> bool:
        if self._store.does_not_answer:
            return False
        key = str(rank)
        number = self._store.ask(
            lambda store: store.get(key) if store.check([key]) else b"0", _ASK_SECONDS
        )
        return number is not None and int(number) >= self._number


def first_words(error: BaseException) -> str:
    """What gloo says, without the place in its source and what it says to everybody."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", line).partition(". ")[0].rstrip(".")
