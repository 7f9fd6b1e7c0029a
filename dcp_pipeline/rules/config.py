"""Configs of the rules, torch-free.

A rule's ``keys`` are globs on dotted keys, as `fnmatch` reads them: ``optimizer.*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from dcp_pipeline.core.kind import FrozenModel, KindConfig
from dcp_pipeline.core.registry import TRANSFORM, model_of
from dcp_pipeline.rules.fields import Dtype, Globs, Integers, KeyPattern, Number, same_places

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.rules.cast import CastRule
    from dcp_pipeline.rules.constant import ConstantRule
    from dcp_pipeline.rules.drop import DropRule, KeepRule
    from dcp_pipeline.rules.exclude import ExcludeRule
    from dcp_pipeline.rules.include import IncludeRule
    from dcp_pipeline.rules.rename import RenameRule
    from dcp_pipeline.rules.reverse import ReverseRule
    from dcp_pipeline.rules.tie import TieRule

__all__ = [
    "CastConfig",
    "ConstantConfig",
    "DeclaredCast",
    "DropConfig",
    "ExcludeConfig",
    "IncludeConfig",
    "KeepConfig",
    "RenameConfig",
    "ReverseConfig",
    "TieConfig",
]


class ExcludeConfig(KindConfig):
    """Leaves out the keys that any of the globs matches."""

    kind: Literal["exclude"] = "exclude"
    keys: Globs
    on: Literal["save", "load", "both"] = "both"

    def build(self) -> ExcludeRule:
        """Make the rule."""
        from dcp_pipeline.rules.exclude import ExcludeRule

        return ExcludeRule(keys=self.keys, on=self.on)


class IncludeConfig(KindConfig):
    """Leaves out the keys that none of the globs matches."""

    kind: Literal["include"] = "include"
    keys: Globs
    on: Literal["save", "load", "both"] = "both"

    def build(self) -> IncludeRule:
        """Make the rule."""
        from dcp_pipeline.rules.include import IncludeRule

        return IncludeRule(keys=self.keys, on=self.on)


class CastConfig(KindConfig):
    """Saves the tensors that any of the globs matches in another dtype.

    ``back`` is the dtype that they have again on the way back; without it they keep the stored one,
    and what a load may convert is declared by the config's ``casts``.
    """

    kind: Literal["cast"] = "cast"
    keys: Globs
    dtype: Dtype
    back: Dtype | None = None

    def build(self) -> CastRule:
        """Make the rule."""
        from dcp_pipeline.rules.cast import CastRule

        return CastRule(keys=self.keys, dtype=self.dtype, back=self.back)


class RenameConfig(KindConfig):
    """Renames keys by pattern: ``layers.{i}.wq.weight: model.layers.{i}.q_proj.weight``."""

    kind: Literal["rename"] = "rename"
    keys: dict[KeyPattern, KeyPattern] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_invertible(self) -> Self:
        for here, there in self.keys.items():
            same_places([here], there)
        if len(set(self.keys.values())) != len(self.keys):
            raise ValueError("two patterns are renamed to one, and nothing would lead back")
        return self

    def build(self) -> RenameRule:
        """Make the rule."""
        from dcp_pipeline.rules.rename import RenameRule

        return RenameRule(keys=self.keys)


class DropConfig(KindConfig):
    """Takes out what any of the globs matches, whichever way the keys go."""

    kind: Literal["drop"] = "drop"
    keys: Globs

    def build(self) -> DropRule:
        """Make the rule."""
        from dcp_pipeline.rules.drop import DropRule

        return DropRule(keys=self.keys)


class KeepConfig(KindConfig):
    """Lets what any of the globs matches pass as it is."""

    kind: Literal["keep"] = "keep"
    keys: Globs

    def build(self) -> KeepRule:
        """Make the rule."""
        from dcp_pipeline.rules.drop import KeepRule

        return KeepRule(keys=self.keys)


class TieConfig(KindConfig):
    """``key`` is ``to`` by another name: the checkpoint holds it once, or with ``write`` twice."""

    kind: Literal["tie"] = "tie"
    key: str = Field(min_length=1)
    to: str = Field(min_length=1)
    write: bool = False

    def build(self) -> TieRule:
        """Make the rule."""
        from dcp_pipeline.rules.tie import TieRule

        return TieRule(self.key, self.to, self.write)


class ConstantConfig(KindConfig):
    """A tensor of one value that only the checkpoint has, or only the state."""

    kind: Literal["constant"] = "constant"
    key: str = Field(min_length=1)
    shape: Integers = ()
    dtype: Dtype = "float32"
    value: Number
    side: Literal["checkpoint", "state"] = "checkpoint"

    def build(self) -> ConstantRule:
        """Make the rule."""
        from dcp_pipeline.rules.constant import ConstantRule

        return ConstantRule(self.key, self.shape, self.dtype, self.value, self.side)


def _rule(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise ValueError("expected a mapping with the kind of a rule and its keys")
    return model_of(TRANSFORM, kind).model_validate(dict(value))


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class ReverseConfig(KindConfig):
    """Rules whose checkpoint is the state here, and whose state is the checkpoint."""

    kind: Literal["reverse"] = "reverse"
    rules: Annotated[
        tuple[Annotated[SerializeAsAny[KindConfig], BeforeValidator(_rule)], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1),
    ]

    def build(self) -> ReverseRule:
        """Make the rule."""
        from dcp_pipeline.rules.reverse import ReverseRule

        return ReverseRule([rule.build() for rule in self.rules])


class DeclaredCast(FrozenModel):
    """A difference of dtypes that a load may bridge, which is an error otherwise.

    A plain string is short for one that only names its keys.

    Attributes:
        keys: glob of the keys it is declared for.
        source: the dtype in the checkpoint; ``None`` for any.
        target: the dtype in the caller's tensor; ``None`` for any.
        on_overflow: what to do when values do not fit the target.
    """

    keys: str = Field(min_length=1)
    source: Dtype | None = None
    target: Dtype | None = None
    on_overflow: Literal["error", "report"] = "report"

    @model_validator(mode="before")
    @classmethod
    def _from_glob(cls, data: Any) -> Any:
        return {"keys": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.source is not None and self.source == self.target:
            raise ValueError(f"a cast from {self.source} to itself changes nothing")
        return self
