"""One load under way: who takes part, where it reads from, and what has to be put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import PeerFailedError, RollbackFailedError, list_some
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path, dotted, is_prefix
from dcp_pipeline.core.table import Kind
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.report import CastRecord
from dcp_pipeline.pipelines.steps.mapped_view import MappedView
from dcp_pipeline.state.assigning import Undo, assign
from dcp_pipeline.state.flatten import Expanded, FlatState
from dcp_pipeline.state.modules import give_state
from dcp_pipeline.state.placing import copied
from dcp_pipeline.state.rng import RngState
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.types.dcp import Stateful

__all__ = ["LoadJob", "Rollback"]


class Rollback:
    """What a load has changed on this rank, and how it was before.

    Args:
        mode: ``copy`` copies tensors before they are overwritten; ``verify_first`` only remembers
            that they were, so that a failure behind the read can say so; ``none`` undoes nothing.

    Attributes:
        copies: whether tensors are copied.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.copies = mode == "copy"
        self._overwritten: dict[str, None] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._expanded: list[Expanded] = []
        self._old_values: dict[Path, Any] = {}
        self._local: list[tuple[str, Callable[[], Any]]] = []
        self._last: list[tuple[str, Callable[[], Any]]] = []
        self._old_states: dict[int, Any] = {}
        self.containers = Undo()

    @property
    def keeper(self) -> Callable[[str, torch.Tensor], None] | None:
        """:meth:`keep`, or ``None`` where nothing is undone."""
        return None if self._mode == "none" else self.keep

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor that is about to be overwritten. Called from several threads."""
        if self.copies:
            self._copies.append((tensor, tensor.detach().clone()))
        elif self._mode == "verify_first":
            self._overwritten[name] = None

    def keep_values(self, flat: FlatState) -> None:
        """Copy the Python values that ``Stateful`` objects gave, which they may share."""
        owners = [entry.path for entry in flat.expanded]
        self._old_values = {
            leaf.path: copy.deepcopy(leaf.value)
            for leaf in flat.leaves
            # Of tensors and arrays, which are read in place, :meth:`keep` has copies.
            if leaf.kind not in (Kind.TENSOR, Kind.ARRAY)
            and not leaf.is_made
            and any(is_prefix(path, leaf.path) for path in owners)
            and flat.local_at(leaf.path) is None
        }

    def keep_objects(self, flat: FlatState) -> None:
        """Copy the states of objects within a :class:`RankLocal`, before anything is read."""
        if self._mode != "none":
            self._old_states = {
                id(entry.owner): copied(entry.state)
                for entry in flat.expanded
                if flat.local_at(entry.path) is not None
            }

    def placing(self, name: str, step: Callable[[], Any]) -> None:
        """Note how a change within a :class:`RankLocal` is taken back."""
        if self._mode != "none":
            self._local.append((name, step))

    def loading(self, name: str, owner: Stateful) -> None:
        """Note that an object within a :class:`RankLocal` is about to take its new state."""
        if self._mode != "none":
            steps = self._last if isinstance(owner, RngState) else self._local
            steps.append((name, partial(give_state, owner, self._old_states[id(owner)])))

    def applying(self, entry: Expanded) -> None:
        """Note that an object is about to take its new state."""
        self._expanded.append(entry)

    def run(self, flat: FlatState | None) -> None:
        """Put everything back.

        Raises:
            RollbackFailedError: naming what could not be.
        """
        if self._mode == "none":
            return
        failed: list[str] = []
        for name, step in reversed(self._local):
            _try(step, name, failed)
        if self._overwritten:
            failed.append(
                "tensors, which rollback=verify_first keeps no copies of"
                f" ({list_some(self._overwritten)})"
            )
        with torch.no_grad():
            for tensor, old in reversed(self._copies):
                _try(partial(tensor.copy_, old), "a tensor", failed)
        _try(self.containers.run, "containers", failed)
        if flat is not None and self._expanded:
            _try(lambda: assign(flat, self._old_values, Undo()), "values", failed)
        # What others draw while they are put back must not be missing from the random states.
        for entry in sorted(reversed(self._expanded), key=_is_random):
            name = dotted(entry.path) or type(entry.owner).__name__
            _try(partial(give_state, entry.owner, entry.state), name, failed)
        for name, step in reversed(self._last):
            _try(step, name, failed)
        self._copies.clear()
        self._expanded.clear()
        self._local.clear()
        self._last.clear()
        self._overwritten.clear()
        if failed:
            raise RollbackFailedError(
                f"the load failed and could not be undone; left changed: {list_some(failed)}"
            )


def _is_random(entry: Expanded) -> bool:
    return isinstance(entry.owner, RngState)


def _try(action: Callable[[], Any], name: str, failed: list[str]) -> None:
    try:
        action()
    except Exception as error:
        failed.append(f"{name} ({type(error).__name__}: {error})")


@dataclass
class LoadJob:
    """State of one load on one rank.

    Attributes:
        parts: what the config built.
        coordinator: the ranks that take part.
        directory: where the checkpoint is.
        rollback: what has been changed so far.
        template: the caller's state, once taken apart.
        manifest: once opened.
        view: the checkpoint behind the rules, where there are any.
        bytes_read, is_verified, casts: what the read did, for the report.
    """

    parts: Parts
    coordinator: Coordinator
    directory: Directory
    rollback: Rollback
    template: FlatState | None = None
    manifest: Manifest | None = None
    view: MappedView | None = None
    bytes_read: int = 0
    is_verified: bool = True
    casts: list[CastRecord] = field(default_factory=list)

    def keys_of(self, manifest: Manifest) -> Manifest:
        """What names the keys that a template is matched with."""
        return manifest if self.view is None else self.view.manifest

    def check_peers(self) -> None:
        """Raise if another rank has failed meanwhile."""
        if self.coordinator.peer_failed():
            raise PeerFailedError(f"rank {self.coordinator.rank} stopped: another rank has failed")
