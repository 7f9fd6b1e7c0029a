"""Configs of the rules that change shapes, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.rules.fields import Globs, Integers, KeyPattern, Number, Patterns, same_places

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.rules.fuse import FuseRule, SplitRule
    from dcp_pipeline.rules.pad import PadRule, ResizeRule
    from dcp_pipeline.rules.rotary import RotaryRule
    from dcp_pipeline.rules.stack import StackRule, UnstackRule
    from dcp_pipeline.rules.transpose import TransposeRule

__all__ = [
    "FuseConfig",
    "PadConfig",
    "ResizeConfig",
    "RotaryConfig",
    "SplitConfig",
    "StackConfig",
    "TransposeConfig",
    "UnstackConfig",
]


class TransposeConfig(KindConfig):
    """Puts the axes in another order; without ``axes`` in the reverse one."""

    kind: Literal["transpose"] = "transpose"
    keys: Globs
    axes: Integers | None = None

    def build(self) -> TransposeRule:
        """Make the rule."""
        from dcp_pipeline.rules.transpose import TransposeRule

        return TransposeRule(keys=self.keys, axes=self.axes)


class RotaryConfig(KindConfig):
    """Pairs of rotary embeddings side by side here, in halves of a head in the checkpoint."""

    kind: Literal["rotary"] = "rotary"
    keys: Globs
    head_dim: int = Field(ge=2, multiple_of=2)

    def build(self) -> RotaryRule:
        """Make the rule."""
        from dcp_pipeline.rules.rotary import RotaryRule

        return RotaryRule(keys=self.keys, head_dim=self.head_dim)


class PadConfig(KindConfig):
    """An axis of ``here`` elements in the state, and of ``there`` in the checkpoint."""

    kind: Literal["pad"] = "pad"
    keys: Globs
    here: int = Field(ge=0)
    there: int = Field(ge=0)
    axis: int = Field(default=0, ge=0)
    fill: Number = 0.0

    def build(self) -> PadRule:
        """Make the rule."""
        from dcp_pipeline.rules.pad import PadRule

        return PadRule(self.keys, self.here, self.there, self.axis, self.fill)


class ResizeConfig(KindConfig):
    """Loads into an axis that has ``size`` elements by now; ``fill: null`` leaves new ones alone.

    A save is not touched: it stores what the state has by then.
    """

    kind: Literal["resize"] = "resize"
    keys: Globs
    size: int = Field(ge=0)
    axis: int = Field(default=0, ge=0)
    fill: Number | None = 0.0

    def build(self) -> ResizeRule:
        """Make the rule."""
        from dcp_pipeline.rules.pad import ResizeRule

        return ResizeRule(self.keys, self.size, self.axis, self.fill)


class _StackFields(KindConfig):
    over: str = Field(min_length=1)
    axis: int = Field(default=0, ge=0)
    count: int | None = Field(default=None, ge=1)


class StackConfig(_StackFields):
    """Numbered tensors as one with an axis more: ``from`` many, ``to`` one.

    ``over`` names the place that counts along it; ``count`` says how many there are, which a rank
    that holds some of them alone cannot know.
    """

    kind: Literal["stack"] = "stack"
    many: KeyPattern = Field(alias="from")
    one: KeyPattern = Field(alias="to")

    @model_validator(mode="after")
    def _is_invertible(self) -> Self:
        same_places([self.many], self.one, self.over)
        return self

    def build(self) -> StackRule:
        """Make the rule."""
        from dcp_pipeline.rules.stack import StackRule

        return StackRule(self.many, self.one, self.over, self.axis, self.count)


class UnstackConfig(_StackFields):
    """One tensor here, many in the checkpoint: the inverse of ``stack``."""

    kind: Literal["unstack"] = "unstack"
    one: KeyPattern = Field(alias="from")
    many: KeyPattern = Field(alias="to")

    @model_validator(mode="after")
    def _is_invertible(self) -> Self:
        same_places([self.many], self.one, self.over)
        return self

    def build(self) -> UnstackRule:
        """Make the rule."""
        from dcp_pipeline.rules.stack import UnstackRule

        return UnstackRule(self.many, self.one, self.over, self.axis, self.count)


class _FuseFields(KindConfig):
    axis: int = Field(default=0, ge=0)
    parts: Integers | None = None
    groups: int = Field(default=1, ge=1)

    def _check(self, several: tuple[str, ...], one: str) -> None:
        same_places(list(several), one)
        if len(set(several)) != len(several):
            raise ValueError("a pattern stands twice")
        if self.parts is not None and len(self.parts) != len(several):
            raise ValueError(f"{len(self.parts)} parts of {len(several)} tensors")
        if self.parts is not None and min(self.parts) < 1:
            raise ValueError("a part is at least 1")


class FuseConfig(_FuseFields):
    """Several tensors as one along an axis.

    ``parts`` says how large each is against the others; ``groups`` cuts them first, and joins them
    group by group.
    """

    kind: Literal["fuse"] = "fuse"
    several: Annotated[Patterns, Field(alias="from", min_length=2)]
    one: KeyPattern = Field(alias="to")

    @model_validator(mode="after")
    def _is_invertible(self) -> Self:
        self._check(self.several, self.one)
        return self

    def build(self) -> FuseRule:
        """Make the rule."""
        from dcp_pipeline.rules.fuse import FuseRule

        return FuseRule(self.several, self.one, self.axis, self.parts, self.groups)


class SplitConfig(_FuseFields):
    """One tensor here, several in the checkpoint: the inverse of ``fuse``."""

    kind: Literal["split"] = "split"
    one: KeyPattern = Field(alias="from")
    several: Annotated[Patterns, Field(alias="to", min_length=2)]

    @model_validator(mode="after")
    def _is_invertible(self) -> Self:
        self._check(self.several, self.one)
        return self

    def build(self) -> SplitRule:
        """Make the rule."""
        from dcp_pipeline.rules.fuse import SplitRule

        return SplitRule(self.several, self.one, self.axis, self.parts, self.groups)
