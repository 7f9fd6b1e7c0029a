"""Which rule of a recipe's map takes which key, and what does not fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcp_pipeline.config.recipe import Recipe, Tensors
from dcp_pipeline.core.affine import Mapped, whole
from dcp_pipeline.core.errors import CheckpointNotFoundError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.rules.mapping import Outcome
from dcp_pipeline.tools.opening import look, open_directory, read_manifest

__all__ = ["Fate", "RuleCheck", "check_rules", "keys_at", "keys_of"]

Keys = Mapping[str, Mapped | None]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a key.

    Attributes:
        key: as it is called before the rules.
        became: what it is called behind them; several where it was cut up, none where it was
            dropped, and itself where no rule took it.
        rules: that had a part in it, each by its name in the map, in order; none where none took
            it.
    """

    key: str
    became: tuple[str, ...]
    rules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """What a map makes of keys.

    Attributes:
        map: its name.
        source, target: the sides that it leads from and to.
        fates: of all keys, in order.
        problems: collisions, tensors that lack others or have shapes that a rule cannot change.
        untaken: keys that no rule takes.
        missing: tensors of the target, by the recipe, that nothing became.
        unexpected: what came of the keys and is no tensor of the target.
        misshapen: names that have another shape than the recipe says, with both.
    """

    map: str
    source: str
    target: str
    fates: tuple[Fate, ...]
    problems: tuple[str, ...]
    untaken: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether everything fits."""
        return not (
            self.problems or self.untaken or self.missing or self.unexpected or self.misshapen
        )


def check_rules(
    recipe: Recipe, name: str, reverse: bool = False, keys: Keys | None = None
) -> RuleCheck:
    """Send keys through a map, and compare what comes of them with the recipe's tensors.

    Args:
        recipe: with the map.
        name: of the map.
        reverse: go through it the other way round.
        keys: what there is; ``None`` for the tensors that the recipe itself has on that side.

    Raises:
        ConfigError: there is no such map, or none of its sides has tensors in the recipe.
        RuleError: the recipe's own tensors do not go through its map.
    """
    own, is_reversed = recipe.find_map(name, reverse)
    here, _, there = own.partition("_to_")
    source, target = (there, here) if is_reversed else (here, there)
    if keys is None:
        keys = _own_keys(recipe, own, source, is_forward=not is_reversed)
    outcome = recipe.mapped(own, keys, is_forward=not is_reversed)
    return RuleCheck(
        own,
        source,
        target,
        _fates(keys, outcome),
        tuple(outcome.problems),
        tuple(outcome.untouched),
        *_differences(outcome, recipe.tensors(target)),
    )


def keys_at(path: str | os.PathLike[str], prefix: str = "", dequantize: str = "none") -> Keys:
    """The keys of the checkpoint at ``path``, of any kind that can be converted.

    Ours is read without torch.

    Args:
        path: of a directory or a file.
        prefix: only keys that begin with it are looked at, without it.
        dequantize: dtype as which codes and scales of a Hugging Face repository are read.

    Raises:
        CheckpointNotFoundError: there is none, or it has no key that begins with the prefix.
        CorruptCheckpointError: naming what is damaged.
    """
    manifest = _manifest(path, dequantize)
    found = keys_of(manifest)
    if not prefix:
        return found
    below = {
        name.removeprefix(prefix): tensor
        for name, tensor in found.items()
        if name.startswith(prefix)
    }
    if not below:
        raise CheckpointNotFoundError(
            f"{os.fspath(path)} has no key that begins with {prefix!r}; its first is"
            f" {next(iter(found), None)!r}",
            os.fspath(path),
        )
    return below


def keys_of(manifest: Manifest) -> dict[str, Mapped | None]:
    """A manifest's keys as rules take them; tied ones are known to be the same."""
    names, specs = manifest.names, manifest.table.keys
    return {
        name: None
        if spec.dtype is None
        else whole(names[spec.alias] if spec.alias >= 0 else name, spec.dtype, spec.shape)
        for name, spec in zip(names, specs, strict=True)
    }


def _manifest(path: str | os.PathLike[str], dequantize: str) -> Manifest:
    if os.path.isdir(path):
        directory = open_directory(path)
        found = look(directory)
        if found.has_manifest:
            return read_manifest(directory, found)
    from dcp_pipeline.layout.foreign.opening import open_source, recognize

    text = os.fspath(path)
    is_repository = dequantize != "none" and recognize(text) == "huggingface"
    return open_source(text, options={"dequantize": dequantize} if is_repository else None)[1]


def _own_keys(recipe: Recipe, name: str, source: str, is_forward: bool) -> Keys:
    """The recipe's tensors on a side of a map; those that are tied there are the same tensor."""
    if source in recipe.info.tensors:
        return _whole(recipe.tensors(source))
    target = (
        name.removeprefix(f"{source}_to_") if is_forward else name.removesuffix(f"_to_{source}")
    )
    outcome = recipe.mapped(name, _whole(recipe.tensors(target)), is_forward=not is_forward)
    outcome.raise_problems(f"the tensors of {recipe.name!r}")
    first: dict[Mapped, str] = {}
    return {
        key: None
        if tensor is None
        else whole(first.setdefault(tensor, key), tensor.dtype, tensor.shape)
        for key, tensor in outcome.tensors.items()
    }


def _whole(tensors: Tensors) -> dict[str, Mapped | None]:
    return {name: whole(name, dtype, shape) for name, (dtype, shape) in tensors.items()}


def _fates(keys: Iterable[str], outcome: Outcome) -> tuple[Fate, ...]:
    became: dict[str, list[str]] = {key: [] for key in keys}
    rules: dict[str, dict[str, None]] = {key: {} for key in keys}
    for name, origin in [*outcome.origins.items(), *outcome.dropped.items()]:
        for source in origin.sources:
            if name not in outcome.dropped:
                became[source].append(name)
            rules[source] |= dict.fromkeys(step.rule for step in origin.steps)
    return tuple(Fate(key, tuple(became[key]), tuple(rules[key])) for key in became)


def _differences(
    outcome: Outcome, wanted: Tensors
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    untaken = set(outcome.untouched)
    made = {name: t for name, t in outcome.tensors.items() if name not in untaken}
    misshapen = [
        f"{name}: {list(tensor.shape)}, the recipe says {list(wanted[name][1])}"
        for name, tensor in made.items()
        if name in wanted and tensor is not None and tensor.shape != wanted[name][1]
    ]
    missing = tuple(name for name in wanted if name not in made)
    unexpected = tuple(name for name in made if name not in wanted)
    return missing, unexpected, tuple(misshapen)
