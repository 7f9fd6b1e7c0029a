"""Puts the axes of tensors in another order."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.rules.elementwise import TensorRule

__all__ = ["TransposeRule"]


class TransposeRule(TensorRule):
    """Axis ``k`` in the checkpoint is axis ``axes[k]`` in the state.

    Args:
        keys: globs on dotted keys.
        axes: the order; ``None`` for the reverse of what there is.
    """

    kind = "transpose"

    def __init__(self, keys: Sequence[str], axes: Sequence[int] | None = None) -> None:
        super().__init__(keys)
        self._axes = None if axes is None else tuple(axes)

    def _order(self, tensor: Mapped) -> tuple[int, ...]:
        return self._axes or tuple(reversed(range(len(tensor.shape))))

    def there(self, tensor: Mapped) -> Mapped:
        return tensor.transposed(self._order(tensor))

    def back(self, tensor: Mapped) -> Mapped:
        order = self._order(tensor)
        if sorted(order) != list(range(len(order))) or len(order) != len(tensor.shape):
            raise ValueError(f"{list(order)} is no order of its axes")
        return tensor.transposed([order.index(axis) for axis in range(len(order))])
