"""What each node of a run took."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["NodeTiming", "Trace"]


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """One node of one run.

    Attributes:
        node: its name.
        seconds: wall time.
        nbytes: bytes that it moved, ``None`` where it moves none.
    """

    node: str
    seconds: float
    nbytes: int | None = None

    @property
    def rate(self) -> float | None:
        """Bytes per second, ``None`` where no bytes were moved."""
        return None if not self.nbytes or not self.seconds else self.nbytes / self.seconds

    def __str__(self) -> str:
        if self.rate is None or self.nbytes is None:
            return f"{self.node} {self.seconds:.3f} s"
        moved = f"{self.nbytes / 1e6:.1f} MB, {self.rate / 1e9:.2f} GB/s"
        return f"{self.node} {self.seconds:.3f} s ({moved})"


@dataclass(slots=True)
class Trace:
    """The nodes of one run, in the order in which they ran.

    Attributes:
        graph: ``save`` or ``load``.
        rank: of this process.
        timings: one per node.
        slowest_writer: on the coordinator of a save, the rank whose write took longest, and the
            seconds.
    """

    graph: str
    rank: int
    timings: list[NodeTiming] = field(default_factory=list)
    slowest_writer: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """Of all nodes together."""
        return sum(timing.seconds for timing in self.timings)

    def __getitem__(self, node: str) -> NodeTiming:
        for timing in self.timings:
            if timing.node == node:
                return timing
        raise KeyError(node)

    def __str__(self) -> str:
        return ", ".join(map(str, self.timings))
