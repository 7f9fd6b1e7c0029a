"""Learning-rate schedulers and their optimizers: loaded together, or neither."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.path import Path, dotted, is_prefix
from dcp_pipeline.state.flatten import FlatState
from dcp_pipeline.state.optimizer_template import OptimizerState

__all__ = ["check_schedulers"]

logger = logging.getLogger("dcp_pipeline")


def check_schedulers(
    flat: FlatState, wants: Callable[[str], bool], has: Callable[[Path], bool]
) -> None:
    """Look whether a scheduler would be loaded without its optimizer, or the other way round.

    Args:
        wants: whether a dotted key takes part in the load.
        has: whether the checkpoint holds anything below a path.

    Raises:
        ConfigError: a scheduler takes part and its optimizer does not: its step count would be set
            over an optimizer that begins anew.
    """
    places = _optimizers(flat)
    for entry in flat.expanded:
        if not isinstance(entry.owner, LRScheduler):
            continue
        place = places.get(id(entry.owner.optimizer))
        if place is None:
            continue
        is_loaded, optimizer_is = (_takes_part(flat, path, wants) for path in (entry.path, place))
        name, optimizer_name = dotted(entry.path), dotted(place)
        if is_loaded and not optimizer_is:
            raise ConfigError(
                f"transforms: {optimizer_name} is left out of the load, and {name}, which schedules"
                " its learning rate, is not: leave out both or none",
            )
        if optimizer_is and not is_loaded and has(entry.path):
            logger.warning(
                "the checkpoint has %s, which is left out of the load: the schedule of %s begins"
                " anew",
                name,
                optimizer_name,
            )


def _optimizers(flat: FlatState) -> dict[int, Path]:
    """``id`` of each optimizer of the state to where it lies."""
    places = {
        id(entry.owner): entry.path
        for entry in flat.expanded
        if isinstance(entry.owner, torch.optim.Optimizer)
    }
    for path, part in flat.fitting:
        if isinstance(part, OptimizerState):
            places |= {id(optimizer): path for optimizer in part.optimizers}
    return places


def _takes_part(flat: FlatState, path: Path, wants: Callable[[str], bool]) -> bool:
    return any(is_prefix(path, leaf.path) and wants(dotted(leaf.path)) for leaf in flat.leaves)
