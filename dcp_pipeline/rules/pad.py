"""Makes an axis longer or shorter, as vocabularies are padded for tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.rules.elementwise import TensorRule
from dcp_pipeline.rules.keys import Keys

__all__ = ["PadRule", "ResizeRule", "resized"]


def resized(tensor: Mapped, axis: int, size: int, fill: float | None) -> Mapped:
    """A tensor whose axis has ``size`` elements: cut, or filled up."""
    if tensor.shape[axis] >= size:
        return tensor.cut(axis, 0, size)
    return tensor.padded(axis, size, fill)


class PadRule(TensorRule):
    """An axis of one size in the state, and of another in the checkpoint.

    Args:
        keys: globs on dotted keys.
        axis: which axis.
        here: its size in the state.
        there: its size in the checkpoint.
        fill: what new elements are, on either side.
    """

    kind = "pad"

    def __init__(
        self, keys: Sequence[str], here: int, there: int, axis: int = 0, fill: float = 0.0
    ) -> None:
        super().__init__(keys)
        self._here, self._there = here, there
        self._axis, self._fill = axis, fill

    def there(self, tensor: Mapped) -> Mapped:
        return self._changed(tensor, self._here, self._there)

    def back(self, tensor: Mapped) -> Mapped:
        return self._changed(tensor, self._there, self._here)

    def _changed(self, tensor: Mapped, old: int, new: int) -> Mapped:
        if tensor.shape[self._axis] != old:
            raise ValueError(
                f"axis {self._axis} has {tensor.shape[self._axis]} elements, not {old}"
            )
        return resized(tensor, self._axis, new, self._fill)


class ResizeRule(TensorRule):
    """A load into tensors that have grown or shrunk along an axis; a save changes nothing.

    Args:
        keys: globs on dotted keys; name the optimizer's moments too.
        axis: which axis.
        size: of the axis in the state.
        fill: what new elements become; ``None`` leaves them as the caller has them.
    """

    kind = "resize"

    def __init__(
        self, keys: Sequence[str], size: int, axis: int = 0, fill: float | None = 0.0
    ) -> None:
        super().__init__(keys)
        self._axis, self._size, self._fill = axis, size, fill

    def forward(self, keys: Keys) -> None:
        return None

    def there(self, tensor: Mapped) -> Mapped:
        return tensor

    def back(self, tensor: Mapped) -> Mapped:
        return resized(tensor, self._axis, self._size, self._fill)
