"""What a recipe says of a model: its tensors by formula, and the rules between frameworks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import Any, Final

from dcp_pipeline.config.explain import validate
from dcp_pipeline.config.formulas import evaluate, evaluate_all
from dcp_pipeline.config.recipe_info import INTEGERS, RecipeInfo
from dcp_pipeline.core.affine import Mapped, whole
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.core.registry import did_you_mean
from dcp_pipeline.rules.base import Rule
from dcp_pipeline.rules.config import ReverseConfig
from dcp_pipeline.rules.mapping import Outcome, mapped_backward, mapped_forward
from dcp_pipeline.rules.patterns import Pattern

__all__ = ["Recipe", "Tensors"]

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Names -> dtype and shape."""

_QUANTIZED: Final = "_quantized"


class Recipe:
    """A recipe whose formulas are evaluated.

    >>> from dcp_pipeline.config.compose import load_recipe
    >>> recipe = load_recipe("llama3_8b", ["recipe.model.layers=2"])
    >>> recipe.model["layers"], recipe.tensors("huggingface")["model.layers.1.mlp.up_proj.weight"]
    (2, ('bfloat16', (14336, 4096)))
    >>> [rule.kind for rule in recipe.rules("torchtitan_to_huggingface")]
    ['rename', 'rotary']

    Args:
        info: what the file says.

    Attributes:
        model: the dimensions by name.

    Raises:
        ConfigError: a formula has no value.
    """

    def __init__(self, info: RecipeInfo) -> None:
        self.info = info
        self.model: Mapping[str, int] = evaluate_all(info.model)
        self._places = {place: self._range(place) for place in info.counts}

    @property
    def name(self) -> str:
        """What it is called."""
        return self.info.name

    @property
    def maps(self) -> tuple[str, ...]:
        """Names of the maps, each of which can be had the other way round too."""
        return tuple(self.info.maps)

    @property
    def sides(self) -> tuple[str, ...]:
        """What `tensors` knows the names of: declared sides first, then those that maps lead to."""
        of_maps = [side for name in self.maps for side in _sides(name)]
        quantized = [f"{side}{_QUANTIZED}" for side in self.info.tensors if self.info.quantized]
        return tuple(dict.fromkeys((*self.info.tensors, *quantized, *of_maps)))

    def tensors(self, side: str = "huggingface") -> Tensors:
        """The tensors of a side: its own, or what a map makes of the declared ones.

        With ``huggingface_quantized`` they are codes and scales, as the published files hold them.

        Raises:
            ConfigError: there is no such side.
            RuleError: the map does not fit the declared tensors.
        """
        declared, is_quantized = side.removesuffix(_QUANTIZED), side.endswith(_QUANTIZED)
        if declared in self.info.tensors and is_quantized and self.info.quantized is not None:
            return dict(self._codes(self._declared(declared)))
        if side in self.info.tensors:
            return dict(self._declared(side))
        for name in self.maps:
            here, there = _sides(name)
            if side in (here, there) and {here, there} & set(self.info.tensors):
                other = there if side == here else here
                found = {key: whole(key, *one) for key, one in self._declared(other)}
                outcome = self.mapped(name, found, is_forward=side == there)
                outcome.raise_problems(f"the tensors of {self.name!r}")
                return {
                    key: (tensor.dtype, tensor.shape)
                    for key, tensor in outcome.tensors.items()
                    if tensor is not None
                }
        raise ConfigError(
            f"the recipe {self.name!r} has no tensors of {side!r}; it has:"
            f" {', '.join(self.sides) or 'none'}{did_you_mean(side, self.sides)}",
            path="recipe.tensors",
        )

    def rules(self, name: str, reverse: bool = False) -> list[KindConfig]:
        """The rules of a map, from the side that it names first to the other.

        Args:
            name: such as ``torchtitan_to_huggingface``, or ``huggingface_to_torchtitan`` for the
                inverse of that.
            reverse: the other way round.

        Raises:
            ConfigError: there is no such map, or a rule of it cannot be built.
        """
        name, is_reversed = self.find_map(name, reverse)
        rules = list(self._rules(name).values())
        return [ReverseConfig(rules=tuple(rules))] if is_reversed else rules

    def find_map(self, name: str, reverse: bool = False) -> tuple[str, bool]:
        """The map's own name, and whether it is gone through the other way round.

        Raises:
            ConfigError: there is no such map.
        """
        here, there = _sides(name)
        for own, is_reversed in ((name, reverse), (f"{there}_to_{here}", not reverse)):
            if own in self.info.maps:
                return own, is_reversed
        raise ConfigError(
            f"the recipe {self.name!r} has no map {name!r}; it has:"
            f" {', '.join(self.maps) or 'none'}{did_you_mean(name, self.maps)}",
            path="recipe.map",
        )

    def mapped(
        self, name: str, found: Mapping[str, Mapped | None], is_forward: bool = True
    ) -> Outcome:
        """What one of `maps` makes of keys; in its messages each rule has its name.

        Raises:
            ConfigError: a rule of it cannot be built.
        """
        rules = [_named(rule, of) for rule, of in self._rules(name).items()]
        return mapped_forward(rules, found) if is_forward else mapped_backward(rules, found)

    def sizes(self, side: str = "huggingface") -> Iterator[tuple[str, str, int, int]]:
        """Pattern, dtype, how many tensors fit it, and how many elements each has.

        No name is made, so that the largest model is counted at once.
        """
        for pattern, shape in self.info.tensors.get(side, {}).items():
            elements = prod(self._shape(pattern, shape))
            yield pattern, self._dtype(pattern), self._count(pattern), elements

    def published_bytes(self, side: str = "huggingface") -> dict[str, int] | None:
        """Dtype -> bytes of the files with codes and scales; ``None`` where they have none."""
        quantized = self.info.quantized
        if quantized is None:
            return None
        sizes: Counter[str] = Counter()
        for pattern, formulas in self.info.tensors.get(side, {}).items():
            shape, dtype = self._shape(pattern, formulas), self._dtype(pattern)
            for _, (stored, stored_shape) in self._codes([(pattern, (dtype, shape))]):
                sizes[stored] += self._count(pattern) * prod(stored_shape) * ITEM_SIZES[stored]
        return dict(sizes)

    def is_trained(self, name: str) -> bool:
        """Whether a tensor, or all that fit a pattern, are changed by the optimizer."""
        return not _fits(name, self.info.buffers)

    def _count(self, pattern: str) -> int:
        return prod(len(self._places[place]) for place in Pattern(pattern).places)

    def _declared(self, side: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        for text, formulas in self.info.tensors[side].items():
            pattern, shape, dtype = Pattern(text), self._shape(text, formulas), self._dtype(text)
            places = pattern.places
            for values in product(*(self._places[place] for place in places)):
                yield pattern.format(dict(zip(places, values, strict=True))), (dtype, shape)

    def _codes(
        self, tensors: Iterable[tuple[str, tuple[str, tuple[int, ...]]]]
    ) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        quantized = self.info.quantized
        assert quantized is not None
        for name, (dtype, shape) in tensors:
            if not _fits(name, quantized.keys):
                yield name, (dtype, shape)
                continue
            yield name, (quantized.dtype, shape)
            blocks = tuple(-(-size // quantized.block) for size in shape)
            yield f"{name}_scale_inv", ("float32", blocks)

    def _dtype(self, name: str) -> str:
        return next(
            (dtype for glob, dtype in self.info.dtypes.items() if fnmatchcase(name, glob)),
            self.info.dtype,
        )

    def _shape(self, pattern: str, formulas: Iterable[int | str]) -> tuple[int, ...]:
        shape = tuple(self._evaluated(formula, f"tensors: {pattern}") for formula in formulas)
        if any(size < 0 for size in shape):
            raise ConfigError(f"recipe.tensors: {pattern}: the shape is {list(shape)}")
        return shape

    def _range(self, place: str) -> range:
        bounds = [self._evaluated(one, f"counts.{place}") for one in self.info.counts[place]]
        if bounds[0] < 0 or (bounds[2:] and bounds[2] < 1):
            raise ConfigError(f"recipe.counts.{place}: found {bounds}; expected [from, to, step]")
        return range(*bounds)

    def _evaluated(self, formula: int | str, where: str) -> int:
        try:
            return evaluate(formula, self.model)
        except ValueError as error:
            raise ConfigError(f"recipe.{where}: {error}", path=f"recipe.{where}") from None

    def _rules(self, name: str) -> dict[str, KindConfig]:
        return {
            rule: self._rule(f"maps.{name}.{rule}", fields)
            for rule, fields in self.info.maps[name].items()
        }

    def _rule(self, path: str, fields: Mapping[str, Any]) -> KindConfig:
        resolved = {
            field: self._resolved(value, f"{path}.{field}") if field in INTEGERS else value
            for field, value in fields.items()
        }
        try:
            (rule,) = validate({"transforms": [resolved]}).transforms
        except ConfigError as error:
            text = error.message.replace("transforms[0]", f"recipe.{path}")
            raise ConfigError(text, path=f"recipe.{path}") from None
        return rule

    def _resolved(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self._resolved(one, path) for one in value]
        return self._evaluated(value, path) if isinstance(value, str) else value


def _sides(name: str) -> tuple[str, str]:
    here, _, there = name.partition("_to_")
    return here, there


def _named(name: str, config: KindConfig) -> Rule:
    rule: Rule = config.build()
    rule.name = name
    return rule


def _fits(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)
