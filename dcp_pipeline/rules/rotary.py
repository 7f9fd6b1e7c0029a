"""Rotary embeddings: the pairs of a head lie side by side, or in two halves.

Meta's code for Llama rotates elements ``2k`` and ``2k + 1`` of a head; transformers rotates ``k``
and ``k + d/2``. The rows of the query's and the key's projection are permuted accordingly, in
transformers' ``convert_llama_weights_to_hf.py`` for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.rules.elementwise import TensorRule

__all__ = ["RotaryRule"]


class RotaryRule(TensorRule):
    """Pairs side by side in the state, halves in the checkpoint; axis 0 holds the heads.

    Args:
        keys: globs on dotted keys; weights and biases alike.
        head_dim: elements of a head, even.
    """

    kind = "rotary"

    def __init__(self, keys: Sequence[str], head_dim: int) -> None:
        super().__init__(keys)
        self._head_dim = head_dim

    def there(self, tensor: Mapped) -> Mapped:
        return self._swapped(tensor, 2)

    def back(self, tensor: Mapped) -> Mapped:
        return self._swapped(tensor, self._head_dim // 2)

    def _swapped(self, tensor: Mapped, inner: int) -> Mapped:
        heads = tensor.unfolded(0, self._head_dim).unfolded(1, inner)
        others = range(3, len(heads.shape))
        return heads.transposed([0, 2, 1, *others]).folded(1).folded(0)
