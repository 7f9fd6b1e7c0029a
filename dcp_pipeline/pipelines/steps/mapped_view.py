"""A checkpoint as the rules call it on the way back: what a template is matched with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dcp_pipeline.core.affine import Mapped, whole
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.rules.base import Rule
from dcp_pipeline.rules.mapping import Outcome, mapped_backward
from dcp_pipeline.state.match import Match

__all__ = ["MappedView", "mapped_view", "stored_tensors"]


@dataclass(frozen=True)
class MappedView:
    """A checkpoint behind its rules.

    Attributes:
        manifest: of the names and tensors that they make; without chunks.
        outcome: what they have made of the stored keys.
        stored: of each value of ``manifest``, by key, the stored key.
    """

    manifest: Manifest
    outcome: Outcome
    stored: dict[int, int]

    def resolve(self, match: Match) -> None:
        """Let what was matched with ``manifest`` be read from what is stored."""
        names = self.manifest.names
        match.tensors = [
            replace(target, mapped=self.outcome.tensors[names[target.key]])
            for target in match.tensors
        ]
        match.values = [replace(target, key=self.stored[target.key]) for target in match.values]


def stored_tensors(manifest: Manifest) -> dict[str, Mapped | None]:
    """The keys of a checkpoint as rules take them; one that shares storage is the other's copy."""
    names, keys = manifest.names, manifest.table.keys
    return {
        name: None
        if spec.dtype is None
        else whole(names[spec.alias if spec.alias >= 0 else key], spec.dtype, spec.shape)
        for key, (name, spec) in enumerate(zip(names, keys, strict=True))
    }


def mapped_view(manifest: Manifest, rules: Sequence[Rule]) -> MappedView:
    """Pass the keys of a checkpoint back through the rules."""
    outcome = mapped_backward(rules, stored_tensors(manifest))
    numbers = {name: key for key, name in enumerate(manifest.names)}
    specs: list[KeySpec] = []
    stored: dict[int, int] = {}
    places: dict[Mapped, int] = {}
    for name, tensor in outcome.tensors.items():
        (source, *others) = outcome.origins[name].sources or ("",)
        old = manifest.table.keys[numbers[source]] if source and not others else None
        path: Path = old.path if old is not None and source == name else (name,)
        kind = old.kind if old is not None else Kind.TENSOR
        if tensor is None:
            assert old is not None
            stored[len(specs)] = numbers[source]
            specs.append(replace(old, path=path))
            continue
        place = places.setdefault(tensor, len(specs)) if tensor.sources else len(specs)
        alias = -1 if place == len(specs) else place
        specs.append(KeySpec(path, kind, tensor.dtype, tensor.shape, alias))
    view = replace(
        manifest,
        names=tuple(outcome.tensors),
        table=ChunkTable.build(specs, [], [], []),
        fingerprint=None,
    )
    return MappedView(view, outcome, stored)
