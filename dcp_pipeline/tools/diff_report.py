"""What a comparison of two checkpoints has found."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DiffReport", "Difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that is not alike in both.

    Attributes:
        name: of the key.
        what: ``only in a``, ``only in b``, ``kind`` (a tensor in one, a value in the other),
            ``shape``, ``dtype``, ``dtype and values``, ``values`` of a tensor, or ``value``.
        a, b: what there is in each: dtype and shape, the first elements that differ, or the value.
        elements, different: of a tensor whose elements were compared.
        max_abs, max_rel: largest ``|a - b|``, and that over ``|b|``, among those that differ;
            ``None`` where nothing can be said.
        first: index of the first element that differs.
    """

    name: str
    what: str
    a: str = ""
    b: str = ""
    elements: int | None = None
    different: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None
    first: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DiffReport:
    """A comparison.

    Attributes:
        a, b: where the checkpoints are.
        a_kind, b_kind: their layouts.
        keys: that both have.
        by_fingerprint: of these, how many are alike by the fingerprints that both saves have
            recorded: their values were not read.
        nbytes: of elements that were read and compared, of one side.
        differences: in the order of ``a``, then of ``b``.
    """

    a: str
    b: str
    a_kind: str
    b_kind: str
    keys: int
    by_fingerprint: int
    nbytes: int
    differences: tuple[Difference, ...]

    @property
    def is_alike(self) -> bool:
        """Whether there is no difference."""
        return not self.differences
