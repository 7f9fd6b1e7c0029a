"""Which stored value a :class:`RankLocal` of the template gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path, dotted
from dcp_pipeline.state.rank_local import parse_rank_key

__all__ = ["LocalValues", "Resized", "StoredValue", "local_values"]


@dataclass(frozen=True)
class Resized:
    """Values of single ranks that another number of ranks has saved.

    Attributes:
        name: dotted path of the :class:`RankLocal`.
        saved, wanted: numbers of ranks, then and now.
        rule: its ``on_resize``.
    """

    name: str
    saved: int
    wanted: int
    rule: str


@dataclass
class StoredValue:
    """The value of one rank.

    Attributes:
        path: where it lies, the rank's key included.
        keys: indices of the stored keys at and below ``path``.
        empty: paths of containers at and below ``path`` that held nothing, and their kinds.
    """

    path: Path
    keys: list[int] = field(default_factory=list)
    empty: list[tuple[Path, str]] = field(default_factory=list)


@dataclass
class LocalValues:
    """What is stored for one :class:`RankLocal`: by number of ranks, then by rank."""

    by_size: dict[int, dict[int, StoredValue]] = field(default_factory=dict)

    def keys(self) -> list[int]:
        """The stored keys of all ranks."""
        return [key for ranks in self.by_size.values() for v in ranks.values() for key in v.keys]

    def nearest_size(self, world_size: int) -> int:
        """The number of ranks whose values are taken: ``world_size`` if it has saved any."""
        return world_size if world_size in self.by_size else max(self.by_size)


def local_values(manifest: Manifest) -> dict[str, LocalValues]:
    """By dotted path, every value of a checkpoint that was saved as that of one rank."""
    found: dict[str, LocalValues] = {}

    def values_at(path: Path) -> list[StoredValue]:
        result = []
        for depth, component in enumerate(path):
            parsed = parse_rank_key(component)
            if parsed is not None:
                rank, world_size = parsed
                ranks = found.setdefault(dotted(path[:depth]), LocalValues()).by_size
                above = path[: depth + 1]
                result.append(ranks.setdefault(world_size, {}).setdefault(rank, StoredValue(above)))
        return result

    for key, spec in enumerate(manifest.table.keys):
        for value in values_at(spec.path):
            value.keys.append(key)
    for path, kind in manifest.empty:
        for value in values_at(path):
            value.empty.append((path, kind))
    return found
