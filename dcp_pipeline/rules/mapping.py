"""All rules of a config, one after another, from the state to the checkpoint or back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.core.errors import RuleError
from dcp_pipeline.rules.base import KeyRule, Rule
from dcp_pipeline.rules.keys import Keys, Origin

__all__ = ["Outcome", "mapped_backward", "mapped_forward"]


@dataclass(frozen=True)
class Outcome:
    """What the rules have made of the keys of one side.

    Attributes:
        tensors: by the names of the other side; ``None`` for a value that is no tensor.
        origins: where each comes from, and by which rules.
        dropped: keys that were taken out, by their last names.
        untouched: keys that no rule has taken, where every key has to be.
        problems: one line each.
    """

    tensors: dict[str, Mapped | None]
    origins: dict[str, Origin]
    dropped: dict[str, Origin]
    untouched: list[str]
    problems: list[str]

    def raise_problems(self, where: str) -> None:
        """Raise what went wrong, all of it.

        Raises:
            RuleError: there are problems, or keys that no rule takes.
        """
        problems = [*self.problems, *(f"no rule takes {name!r}" for name in self.untouched)]
        if problems:
            raise RuleError.of(problems, where)


def mapped_forward(
    rules: Sequence[Rule], found: Mapping[str, Mapped | None], is_partial: bool = False
) -> Outcome:
    """From the keys of a state to those of its checkpoint.

    Args:
        found: what there is, by name.
        is_partial: whether other ranks may hold further keys.
    """
    keys = Keys(found, is_partial)
    for rule in rules:
        rule.forward(keys)
    return _outcome(rules, keys)


def mapped_backward(rules: Sequence[Rule], found: Mapping[str, Mapped | None]) -> Outcome:
    """From the keys of a checkpoint to those of the state that it is loaded into."""
    keys = Keys(found)
    for rule in reversed(rules):
        rule.backward(keys)
    return _outcome(rules, keys)


def _outcome(rules: Sequence[Rule], keys: Keys) -> Outcome:
    # A map says of every key what becomes of it; one that it forgets would be lost unseen.
    is_map = any(isinstance(rule, KeyRule) for rule in rules)
    names = keys.names()
    return Outcome(
        {name: keys[name] for name in names},
        {name: keys.origin(name) for name in names},
        keys.dropped,
        keys.untouched() if is_map else [],
        keys.problems,
    )
