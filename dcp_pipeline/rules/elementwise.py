"""What rules that change single tensors, and keep their names, have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.rules.base import KeyRule, matches
from dcp_pipeline.rules.keys import Keys

__all__ = ["TensorRule"]


class TensorRule(KeyRule):
    """Changes every tensor that any of the globs matches.

    Args:
        keys: globs on dotted keys, as they are called at this place of the rules.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(keys)

    @abstractmethod
    def there(self, tensor: Mapped) -> Mapped:
        """A tensor of the state, as the checkpoint has it.

        Raises:
            ValueError: its shape does not allow that.
        """

    @abstractmethod
    def back(self, tensor: Mapped) -> Mapped:
        """The inverse of :meth:`there`."""

    def forward(self, keys: Keys) -> None:
        self._change(keys, is_forward=True)

    def backward(self, keys: Keys) -> None:
        self._change(keys, is_forward=False)

    def _change(self, keys: Keys, is_forward: bool) -> None:
        change = self.there if is_forward else self.back
        for name in keys.names():
            if not matches(name, self._keys):
                continue
            tensor = keys.tensor(name, self.label)
            if tensor is None:
                continue
            try:
                keys.update(name, change(tensor), self.label)
            except (ValueError, IndexError) as error:
                keys.problems.append(f"{self.label}: {name!r} of {list(tensor.shape)}: {error}")
