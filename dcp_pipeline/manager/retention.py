"""Which steps of a run stay; a pure function of what is there."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Retention", "StepRecord"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as the policy sees it.

    Attributes:
        step: its number.
        score: of the metric that decides which are best; ``None`` where it has none.
        is_whole: whether its files are there with the sizes that were written.
        is_pinned: whether somebody has said that it stays.
        is_being_saved: whether a save into it is under way.
        is_foreign: whether another program has written it; it stays, and counts for nothing.
    """

    step: int
    score: float | None = None
    is_whole: bool = True
    is_pinned: bool = False
    is_being_saved: bool = False
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Retention:
    """Says which steps may go.

    Args:
        keep_last: how many of the newest whole steps stay; ``None`` for all of them.
        keep_every: steps divisible by it stay.
        keep_best: how many of the best whole steps stay; of equal ones the newest.
        mode: whether the lowest or the highest score is best. One that is no finite number never
            is.

    Example:
        >>> records = [StepRecord(step, score=step % 100) for step in range(10, 260, 10)]
        >>> removable = Retention(keep_last=2, keep_every=100, keep_best=1, mode="max").removable
        >>> sorted({record.step for record in records} - removable(records))
        [100, 190, 200, 240, 250]
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    mode: Literal["min", "max"] = "min"

    def removable(
        self, records: Collection[StepRecord], protected: Collection[int] = ()
    ) -> set[int]:
        """The steps that nothing keeps.

        What is pinned, being written or of another program is never among them, nor is anything
        newer than the oldest of the last ones; nothing is, where fewer whole ones are there.

        Args:
            protected: further steps that stay, such as the one just saved.
        """
        last = self._last(records)
        if len(last) < (self.keep_last or len(records) + 1):
            return set()
        oldest = min(last)
        kept = {*protected, *last, *self._best(records)}
        return {
            record.step
            for record in records
            if record.step not in kept
            and record.step < oldest
            and not (record.is_pinned or record.is_being_saved or record.is_foreign)
            and not (self.keep_every and record.step % self.keep_every == 0)
        }

    def _last(self, records: Iterable[StepRecord]) -> list[int]:
        whole = sorted(
            record.step for record in records if record.is_whole and not record.is_foreign
        )
        return whole if self.keep_last is None else whole[-self.keep_last :]

    def _best(self, records: Iterable[StepRecord]) -> list[int]:
        sign = -1.0 if self.mode == "min" else 1.0
        scored = sorted(
            (sign * record.score, record.step)
            for record in records
            if record.is_whole and record.score is not None and math.isfinite(record.score)
        )
        return [step for _, step in scored[-self.keep_best :]] if self.keep_best else []
