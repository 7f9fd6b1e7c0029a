"""What the header ``recipe`` of a recipe file says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BeforeValidator, Field, model_validator

from dcp_pipeline.config.formulas import Formula, evaluate_all, names_in
from dcp_pipeline.core.kind import FrozenModel, Names
from dcp_pipeline.core.registry import did_you_mean
from dcp_pipeline.rules.fields import Dtype, KeyPattern
from dcp_pipeline.rules.patterns import Pattern

if TYPE_CHECKING:
    from typing import Self

__all__ = ["INTEGERS", "Parallel", "Quantization", "RecipeInfo", "Training"]

INTEGERS: Final = frozenset(
    {"axis", "count", "groups", "head_dim", "here", "parts", "shape", "size", "there"}
)
"""Fields of rules in which a formula may stand."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_bounds(value: object) -> object:
    return tuple(value) if isinstance(value, list) else (0, value)


_Shape = Annotated[tuple[Formula, ...], BeforeValidator(_as_tuple)]
_Bounds = Annotated[
    tuple[Formula, ...], BeforeValidator(_as_bounds), Field(min_length=2, max_length=3)
]


class Parallel(FrozenModel):
    """How the model is usually spread over ranks.

    Attributes:
        data: ranks over which FSDP shards each tensor.
        tensor: ranks of tensor parallelism.
        pipeline: stages.
        expert: ranks that share out the experts; they are some of the others.
    """

    data: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.data * self.tensor % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide data * tensor = {self.data * self.tensor}"
            )
        return self


class Training(FrozenModel):
    """What a training state keeps of every parameter.

    Attributes:
        weights: dtype of the weights that the optimizer changes.
        moments: dtype of AdamW's two moments.
    """

    weights: Dtype = "float32"
    moments: Dtype = "float32"


class Quantization(FrozenModel):
    """Tensors that a model's repository holds as codes in blocks, with one scale for each.

    Attributes:
        keys: globs on their names.
        dtype: of the codes.
        block: rows and columns that share a scale of float32, ``*_scale_inv`` by its name.
    """

    keys: Names = Field(min_length=1)
    dtype: Dtype = "float8_e4m3fn"
    block: int = Field(default=128, ge=1)


class RecipeInfo(FrozenModel):
    """The header ``recipe`` of a recipe file; what it comes to is a `Recipe`.

    Attributes:
        name: what the recipe is called.
        description: one sentence: which model, on how many devices.
        map: name of one of ``maps``, whose rules are put behind the config's ``transforms``; with
            the sides exchanged, such as ``huggingface_to_torchtitan``, for its inverse.
        model: dimensions by name; each an integer, or a formula in those before it.
        counts: what the places in ``tensors`` count, in formulas: ``n`` from 0, or ``[from, to]``,
            or ``[from, to, step]``.
        dtype: of the tensors.
        dtypes: glob on names -> another dtype.
        buffers: globs on names of tensors that are not trained.
        tensors: side -> pattern of names -> shape, in formulas.
        maps: ``from_to_to``, such as ``torchtitan_to_huggingface`` -> rules by name, in order.
            Where a rule wants an integer, it may be a formula.
        quantized: what the published files hold as codes and scales.
        parallel: how the model is usually spread over ranks.
        training: what a training state keeps of every parameter.
    """

    name: str = Field(min_length=1)
    description: str = ""
    map: str | None = None
    model: dict[str, Formula] = Field(default_factory=dict)
    counts: dict[str, _Bounds] = Field(default_factory=dict)
    dtype: Dtype = "bfloat16"
    dtypes: dict[str, Dtype] = Field(default_factory=dict)
    buffers: Names = ()
    tensors: dict[str, dict[KeyPattern, _Shape]] = Field(default_factory=dict)
    maps: dict[str, dict[str, Mapping[str, Any]]] = Field(default_factory=dict)
    quantized: Quantization | None = None
    parallel: Parallel = Parallel()
    training: Training = Training()

    @model_validator(mode="after")
    def _can_be_evaluated(self) -> Self:
        evaluate_all(self.model)
        for name in self.maps:
            here, joint, there = name.partition("_to_")
            if not (here and joint and there):
                raise ValueError(f"the map {name!r} must be called SIDE_to_SIDE")
        for side, patterns in self.tensors.items():
            for pattern in patterns:
                unknown = [place for place in Pattern(pattern).places if place not in self.counts]
                if unknown:
                    raise ValueError(
                        f"tensors.{side}: {pattern!r} has the place {{{unknown[0]}}}, of which"
                        " counts says nothing"
                    )
        return self

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Self:
        used = set[str]().union(*map(names_in, self._formulas()))
        for name in self.model:
            if name not in used:
                known = tuple(other for other in self.model if other != name)
                raise ValueError(f"model.{name}: no formula uses it{did_you_mean(name, known)}")
        patterns = [pattern for of_side in self.tensors.values() for pattern in of_side]
        quantized = () if self.quantized is None else self.quantized.keys
        for glob in (*self.dtypes, *self.buffers, *quantized):
            if not any(fnmatchcase(pattern, glob) for pattern in patterns):
                raise ValueError(f"no pattern of tensors fits {glob!r}")
        return self

    def _formulas(self) -> Iterator[int | str]:
        yield from self.model.values()
        for bounds in self.counts.values():
            yield from bounds
        for patterns in self.tensors.values():
            for shape in patterns.values():
                yield from shape
        for rules in self.maps.values():
            for fields in rules.values():
                for field in INTEGERS & fields.keys():
                    value = fields[field]
                    values = value if isinstance(value, list) else [value]
                    yield from (one for one in values if isinstance(one, str))
