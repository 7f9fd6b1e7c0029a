"""How the ranks of one save or load find out who of them is gone.

A rank that has lost contact with another, or waits for long, does not know whether that one is
gone or waits itself, for a third. So it raises an alarm. Every rank that sees it says that it is
there, and for whom it waits; who does not say so is gone. The first to name the lost decides it
for all, and for all that comes later: the group is not used any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_pipeline.coordination.asked_store import AskedStore

__all__ = ["INTERRUPTED", "LOST", "RollCall", "Verdict"]

INTERRUPTED = "it was interrupted"
LOST = "lost"
"""Where in a group's store it stands who is lost."""

_ALARM = "alarm"
_NAMED = 32


@dataclass(frozen=True)
class Verdict:
    """Who is lost.

    Attributes:
        lost: the ranks.
        teller: the rank that found out.
        turn: number of the save or load in which it did.
        reason: how it did.
    """

    lost: tuple[int, ...]
    teller: int
    turn: int
    reason: str

    def encode(self) -> str:
        """As it lies in the store."""
        return json.dumps([self.lost, self.teller, self.turn, self.reason])

    @classmethod
    def decode(cls, text: bytes) -> Verdict:
        """The inverse of :meth:`encode`."""
        lost, teller, turn, reason = json.loads(text)
        return cls(tuple(lost), teller, turn, reason)


class RollCall:
    """One save or load, as seen by one rank.

    Args:
        store: where the ranks leave their words.
        turn: number of the save or load, the same on all ranks.
        rank: this one.
        waits_for: the ranks for which this one waits at this moment.
        glance: seconds that a look at the store may take.
    """

    def __init__(
        self,
        store: AskedStore,
        turn: int,
        rank: int,
        waits_for: Callable[[], Sequence[int]],
        glance: float,
    ) -> None:
        self._store = store
        self._turn = turn
        self._rank = rank
        self._waits_for = waits_for
        self._glance = glance
        self._failed, self._here = f"failed/{turn}", f"here/{turn}"
        self._word = f"word/{turn}"
        self._said: str | None = None
        self._is_raised = False

    def look(self) -> Verdict | None:
        """What was decided; answers the call, if there is one."""
        if not self._is_called():
            return None
        self._say_here()
        text = self._ask(lambda store: store.get(LOST) if store.check([LOST]) else b"")
        return Verdict.decode(text) if text else None

    def raise_alarm(self) -> None:
        """Call all ranks."""
        if not self._is_raised:
            self._is_raised = bool(self._ask(lambda store: (store.set(_ALARM, "1"), True)))
        self._say_here()

    def decide(self, suspects: Sequence[int], reason: str, seconds: float) -> Verdict:
        """Name those that did not answer the call, unless somebody has done so before.

        Args:
            suspects: the ranks that did not do their part towards this one.
            seconds: that this may take.
        """
        self._glance = max(self._glance, seconds / 4)
        verdict = Verdict(tuple(self._silent(suspects)), self._rank, self._turn, reason)
        return self._settle(verdict)

    def tell_interrupted(self) -> None:
        """Let the others know that this rank does not go on."""
        self._settle(Verdict((self._rank,), self._rank, self._turn, INTERRUPTED))
        self.raise_alarm()

    def tell_failed(self) -> None:
        """Let the others know that this rank will fail at the next exchange."""
        self._ask(lambda store: store.set(self._failed, str(self._rank)))

    def has_failure(self) -> bool:
        """Whether another rank has failed or is lost; answers the call, if there is one."""
        is_lost = self.look() is not None
        return is_lost or bool(self._ask(lambda store: store.check([self._failed])))

    def leave_word(self, word: str) -> None:
        """Say something to all ranks."""
        self._ask(lambda store: store.set(self._word, word))

    def word(self) -> str:
        """What was said, or nothing."""
        text = self._ask(lambda store: store.get(self._word) if store.check([self._word]) else b"")
        return (text or b"").decode()

    def _settle(self, verdict: Verdict) -> Verdict:
        text = self._ask(lambda store: store.compare_set(LOST, "", verdict.encode()))
        return Verdict.decode(text) if text else verdict

    def _silent(self, suspects: Sequence[int]) -> list[int]:
        """Those who are not there; or else those for whom they wait who are not, and so on."""
        seen, named = {self._rank}, list(suspects)
        while True:
            words = {rank: self._word_of(rank) for rank in named[:_NAMED]}
            silent = [rank for rank, word in words.items() if word is None]
            if silent:
                return silent
            seen.update(named)
            further = [json.loads(word) for word in words.values() if word]
            following = list(dict.fromkeys(r for ranks in further for r in ranks if r not in seen))
            if not following:
                # All are there, and yet nothing came.
                return named[:1]
            named = following

    def _word_of(self, rank: int) -> bytes | None:
        """What a rank has answered; ``None`` if it did not."""
        key = f"{self._here}/{rank}"
        word = self._ask(lambda store: store.get(key) if store.check([key]) else b"")
        return word or None

    def _is_called(self) -> bool:
        self._is_raised = self._is_raised or bool(self._ask(lambda s: s.check([_ALARM])))
        return self._is_raised

    def _say_here(self) -> None:
        word = json.dumps(list(self._waits_for())[:_NAMED])
        if word != self._said:
            key = f"{self._here}/{self._rank}"
            if self._ask(lambda store: (store.set(key, word), True)):
                self._said = word

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return self._store.ask(question, self._glance)
