"""One step of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dcp_pipeline.core.errors import GraphError

__all__ = ["Node", "Where"]


class Where(StrEnum):
    """Where a node runs."""

    EVERY_RANK = "every rank"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Node:
    """A function with named inputs and outputs.

    Attributes:
        name: unique in its graph; named in every error and in the trace.
        function: called with the inputs as keyword arguments. With one output it returns the value,
            with several a tuple, with none anything.
        inputs, outputs: names of values.
        where: on every rank, or on the coordinator only (elsewhere the outputs are ``None``).
        coordinates: the node agrees with other ranks, so it runs even when this rank has failed
            before. Its function takes a further argument ``failure``, the error or ``None``; inputs
            that were never made are ``None`` then.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    where: Where = Where.EVERY_RANK
    coordinates: bool = False

    def __post_init__(self) -> None:
        if self.coordinates and self.where is Where.COORDINATOR:
            raise GraphError(f"node {self.name!r} coordinates, so it has to run on every rank")
