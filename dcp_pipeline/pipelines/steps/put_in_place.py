"""What the node ``apply`` does on one rank: everything that was read goes to its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dcp_pipeline.core.path import Path, dotted
from dcp_pipeline.pipelines.load_job import Rollback
from dcp_pipeline.state.assigning import Undo, assign, take_out
from dcp_pipeline.state.flatten import FlatState, Local
from dcp_pipeline.state.modules import give_state
from dcp_pipeline.state.placing import placed, with_objects
from dcp_pipeline.state.rng import RngState
from dcp_pipeline.types.dcp import Stateful

__all__ = ["put_in_place"]

Last = list[tuple[RngState, Any]]
"""Random states, which are set when everything else is done: other objects may draw numbers."""


def put_in_place(template: FlatState, values: Mapping[Path, Any], rollback: Rollback) -> None:
    """Put ``values`` at their paths and let ``Stateful`` objects take their states."""
    rollback.keep_values(template)
    last: Last = []
    shared: dict[Path, Any] = {}
    own: dict[Path, dict[Path, Any]] = {}
    for path, value in values.items():
        local = template.local_at(path)
        if local is None:
            shared[path] = value
        else:
            own.setdefault(local.path, {})[path[len(local.path) :]] = value
    assign(template, shared, rollback.containers)
    take_out(template, rollback.containers)
    for path, below in own.items():
        _put_local(template.locals[path], below, template, rollback, last)
    failures: list[Exception] = []
    # The inner before the outer, whose state holds the inner objects themselves.
    for entry in reversed(template.expanded):
        if template.local_at(entry.path) is not None:
            continue
        if isinstance(entry.owner, RngState):
            last.append((entry.owner, entry.state))
        rollback.applying(entry)
        if not isinstance(entry.owner, RngState):
            # After a failure the rest takes its state all the same, and then its old one: in both
            # the other ranks may need this one, as for FSDP1's modules.
            _collect(failures, partial(give_state, entry.owner, entry.state))
    for owner, state in last:
        _collect(failures, partial(owner.load_state_dict, state))
    if failures:
        raise failures[0]


def _collect(failures: list[Exception], action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:
        failures.append(error)


def _put_local(
    local: Local, values: Mapping[Path, Any], flat: FlatState, rollback: Rollback, last: Last
) -> None:
    """Give a :class:`RankLocal` the value that lies at ``(local.key, ...)`` in ``values``."""
    tree: dict[str, Any] = {}
    assign(FlatState(tree), values, Undo())
    name = dotted(local.path) or local.key
    states = {
        id(entry.owner): entry.state
        for entry in flat.expanded
        if flat.local_at(entry.path) is local
    }

    def load(owner: Stateful, saved: Any) -> None:
        # Inner objects first: the state that the outer one takes holds the objects themselves.
        state = with_objects(states[id(owner)], saved, load)
        rollback.loading(name, owner)
        if isinstance(owner, RngState):
            last.append((owner, state))
        else:
            give_state(owner, state)

    before = local.owner.value
    after = placed(before, tree[local.key], partial(rollback.placing, name), load)
    rollback.placing(name, partial(setattr, local.owner, "value", before))
    local.owner.value = after
