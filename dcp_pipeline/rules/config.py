"""Configs of the rules, torch-free.

A rule's ``keys`` are globs on dotted keys, as `fnmatch` reads them: ``optimizer.*``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.kind import FrozenModel, KindConfig, Names

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.rules.cast import CastRule
    from dcp_pipeline.rules.exclude import ExcludeRule
    from dcp_pipeline.rules.include import IncludeRule

__all__ = ["CastConfig", "DeclaredCast", "ExcludeConfig", "IncludeConfig"]


def _dtype(name: str) -> str:
    if name not in ITEM_SIZES:
        raise ValueError(f"allowed: {', '.join(ITEM_SIZES)}")
    return name


Dtype = Annotated[str, AfterValidator(_dtype)]
Globs = Annotated[Names, Field(min_length=1)]


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

    What a load may convert is declared by the config's ``casts``.
    """

    kind: Literal["cast"] = "cast"
    keys: Globs
    dtype: Dtype

    def build(self) -> CastRule:
        """Make the rule."""
        from dcp_pipeline.rules.cast import CastRule

        return CastRule(keys=self.keys, dtype=self.dtype)


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
