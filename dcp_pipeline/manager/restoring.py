"""Where a run goes on: the newest checkpoint that loads whole."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from dcp_pipeline.core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from dcp_pipeline.manager.damage import is_damage
from dcp_pipeline.manager.differences import changed
from dcp_pipeline.manager.events import CheckpointEvent, Events
from dcp_pipeline.manager.ranks import Ranks
from dcp_pipeline.manager.roots import Root
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.pipelines.report import LoadReport
from dcp_pipeline.pipelines.steps.save_commit import versions

__all__ = ["Restored", "Restorer", "tell_restored"]

logger = logging.getLogger("dcp_pipeline")


@dataclass(frozen=True)
class Restored:
    """What a restore has done.

    Attributes:
        step: that was loaded, ``None`` where there was nothing.
        seconds: of the whole, steps that turned out to be damaged included.
        skipped: newer steps that were gone past, and what is wrong with each.
        report: of the load.
    """

    step: int | None
    seconds: float
    skipped: dict[int, str] = field(default_factory=dict)
    report: LoadReport | None = None


class Restorer:
    """Finds a step and loads it, on all ranks together.

    Args:
        root: where the steps are.
        pipeline: what loads.
        ranks: who loads.
        fallback: whether the step before one that is damaged is tried.
    """

    def __init__(self, root: Root, pipeline: Pipeline, ranks: Ranks, fallback: bool) -> None:
        self._root = root
        self._pipeline = pipeline
        self._ranks = ranks
        self._fallback = fallback

    def step(self, state: Any, step: int) -> Restored:
        """Load one step, whatever else is there."""
        started = time.monotonic()
        report = self._load(state, step)
        return self._restored(step, started, {}, report)

    def newest(self, state: Any) -> Restored:
        """Load the newest step that loads whole.

        Raises:
            CorruptCheckpointError: there are steps, and none of them does.
        """
        started = time.monotonic()
        skipped: dict[int, str] = {}
        while True:
            step = self._choose(skipped)
            if step is None:
                self._log(logging.INFO, "nothing to restore in %s", self._root.location)
                return Restored(None, time.monotonic() - started, skipped)
            try:
                report = self._load(state, step)
            except Exception as error:
                # Joint: every rank has the same error, and comes to the same conclusion.
                if not (self._fallback and is_damage(error)):
                    raise
                self._skip(skipped, step, str(error))
                continue
            return self._restored(step, started, skipped, report)

    def _load(self, state: Any, step: int) -> LoadReport:
        path = self._root.path(step)
        try:
            return self._pipeline.load(state, path, process_group=self._ranks.group)
        except Exception as error:
            error.add_note(f"while {path} was restored")
            raise

    def _choose(self, skipped: dict[int, str]) -> int | None:
        """The newest step that may be whole; those newer are skipped, and named in a warning."""
        step, found = self._ranks.decide("choose step", None, lambda _: self._look(dict(skipped)))
        for number, why in found:
            self._skip(skipped, int(number), str(why))
        return None if step is None else int(step)

    def _look(self, skipped: dict[int, str]) -> tuple[int | None, list[tuple[int, str]]]:
        """On the coordinator: sizes are compared here, checksums while a step is loaded."""
        root, found = self._root, dict[int, str]()
        committed = root.committed()
        chosen = None
        for step in reversed(committed):
            if step in skipped:
                continue
            try:
                root.check_sizes(step, is_fresh=True)
            except (CheckpointError, OSError) as error:
                if not root.is_committed(step):
                    continue  # somebody has removed it meanwhile
                if not (self._fallback and is_damage(error)):
                    raise
                found[step] = str(error)
                continue
            chosen = step
            break
        bad = {step: why for step, why in (skipped | found).items() if step in committed}
        if chosen is None and bad:
            raise self._nothing_is_whole(bad)
        return chosen, list((found | self._incomplete(chosen, skipped)).items())

    def _nothing_is_whole(self, bad: dict[int, str]) -> CorruptCheckpointError:
        lines = [f"step {step}: {bad[step]}" for step in sorted(bad, reverse=True)]
        return CorruptCheckpointError(
            f"there are {len(bad)} checkpoints in {self._root.location}, and none can be loaded."
            " Restore files from a copy, or begin in another root:\n  " + "\n  ".join(lines)
        )

    def _incomplete(self, chosen: int | None, skipped: dict[int, str]) -> dict[int, str]:
        found = {
            step: "a save into it is under way" if is_live else "its save never finished"
            for step, is_live in self._root.uncommitted().items()
            if step not in skipped and (chosen is None or step > chosen)
        }
        if found and not self._fallback:
            step = max(found)
            path = self._root.path(step)
            raise IncompleteCheckpointError(
                f"the checkpoint in {path} is incomplete: {found[step]}. `dcp-pipeline prune`"
                " removes what nobody writes any more; manager.fallback=true goes past it",
                path,
            )
        return {step: f"incomplete: {why}" for step, why in found.items()}

    def _skip(self, skipped: dict[int, str], step: int, why: str) -> None:
        skipped[step] = why
        self._log(logging.WARNING, "%s is skipped: %s", self._root.path(step), why)

    def _restored(
        self, step: int, started: float, skipped: dict[int, str], report: LoadReport
    ) -> Restored:
        restored = Restored(step, time.monotonic() - started, skipped, report)
        if self._ranks.is_coordinator:
            path = self._root.path(step)
            logger.info("resumed from step %d in %.3f s: %s", step, restored.seconds, path)
            self._say_what_differs(step)
        return restored

    def _say_what_differs(self, step: int) -> None:
        """Config, versions and number of ranks, where they are not those of the save."""
        try:
            saved = self._root.summary(step)
        except (CheckpointError, OSError):
            return
        if saved.is_foreign:
            return
        before = {**saved.config, "versions": saved.versions, "ranks": saved.world_size}
        config = self._pipeline.config.to_dict()
        after = {**config, "versions": versions(), "ranks": self._ranks.world_size}
        differences = changed(before, after)
        if differences:
            logger.info("step %d was saved otherwise: %s", step, "; ".join(differences))

    def _log(self, level: int, message: str, *arguments: object) -> None:
        if self._ranks.is_coordinator:
            logger.log(level, message, *arguments)


def tell_restored(events: Events, restored: Restored, root: Root, rank: int) -> None:
    """Hand over the events of a restore: what it went past, its nodes, and the whole of it."""
    for step, why in restored.skipped.items():
        detail = {"path": root.path(step), "error": why}
        events.emit(CheckpointEvent("damaged", step, rank, detail=detail))
    report = restored.report
    if restored.step is None or report is None:
        return
    events.nodes(restored.step, report.trace)
    events.emit(
        CheckpointEvent(
            "restored",
            restored.step,
            rank,
            seconds=restored.seconds,
            nbytes=report.bytes_read,
            detail={"path": report.checkpoint_id, "is_verified": report.is_verified},
        )
    )
