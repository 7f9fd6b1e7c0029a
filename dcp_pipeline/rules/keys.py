"""The keys of a checkpoint on their way through the rules, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_pipeline.core.affine import Mapped

__all__ = ["Keys", "Origin", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """A rule that has taken keys.

    Attributes:
        rule: how messages call it.
        taken: the keys that it took, as they were called then.
    """

    rule: str
    taken: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a key comes from.

    Attributes:
        sources: keys of the other side.
        steps: the rules that have made it of them, in order.
    """

    sources: tuple[str, ...]
    steps: tuple[Step, ...] = ()


class Keys:
    """Names, what stands for each, and what went wrong so far.

    Args:
        found: the tensors by name, ``None`` for a value that is no tensor.
        is_partial: whether other ranks may hold further keys, so that lacking ones are no error.

    Attributes:
        problems: one line each.
        dropped: keys that a rule has taken out, and where they came from.
    """

    def __init__(self, found: Mapping[str, Mapped | None], is_partial: bool = False) -> None:
        self._entries = dict(found)
        self._origins = {name: Origin((name,)) for name in found}
        self.is_partial = is_partial
        self.problems: list[str] = []
        self.dropped: dict[str, Origin] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Mapped | None:
        return self._entries[name]

    def names(self) -> list[str]:
        """All of them, in order."""
        return list(self._entries)

    def origin(self, name: str) -> Origin:
        """Where a key comes from."""
        return self._origins[name]

    def tensor(self, name: str, rule: str) -> Mapped | None:
        """A tensor that a rule needs; a value in its place is a problem."""
        found = self._entries[name]
        if found is None:
            self.problems.append(f"{rule}: {name!r} is no tensor")
        return found

    def replace(self, taken: Sequence[str], made: Mapping[str, Mapped | None], rule: str) -> None:
        """Put what a rule has made of some keys in their place."""
        step = Step(rule, tuple(taken))
        origins = [self._origins[name] for name in taken]
        sources = tuple(dict.fromkeys(s for origin in origins for s in origin.sources))
        steps = tuple(dict.fromkeys(s for origin in origins for s in origin.steps))
        origin = Origin(sources, (*steps, step))
        for name in taken:
            del self._entries[name], self._origins[name]
        if not made:
            self.dropped.update(dict.fromkeys(taken, origin))
        for name, mapped in made.items():
            if name in self._entries:
                self.problems.append(
                    f"{rule} makes {name!r} of {_some(taken)}, and it is there already, from"
                    f" {_some(self._origins[name].sources)}"
                )
                continue
            self._entries[name], self._origins[name] = mapped, origin

    def rename_all(self, pairs: Mapping[str, str], rule: str) -> None:
        """Rename keys at once, so that two may change places."""
        values = {old: (self._entries.pop(old), self._origins.pop(old)) for old in pairs}
        for old, new in pairs.items():
            mapped, origin = values[old]
            if new in self._entries:
                self.problems.append(
                    f"{rule} renames {old!r} to {new!r}, which is there already, from"
                    f" {_some(self._origins[new].sources)}"
                )
                continue
            self._entries[new] = mapped
            self._origins[new] = Origin(origin.sources, (*origin.steps, Step(rule, (old,))))

    def update(self, name: str, mapped: Mapped | None, rule: str) -> None:
        """Change a key in its place."""
        origin = self._origins[name]
        self._entries[name] = mapped
        self._origins[name] = Origin(origin.sources, (*origin.steps, Step(rule, (name,))))

    def change(self, name: str, mapped: Mapped) -> None:
        """Change a key without taking it: some other rule still has to."""
        self._entries[name] = mapped

    def add(self, name: str, like: str, rule: str) -> None:
        """A second name for what a key stands for."""
        origin = self._origins[like]
        self._entries[name] = self._entries[like]
        self._origins[name] = Origin(origin.sources, (*origin.steps, Step(rule, (like,))))

    def untouched(self) -> list[str]:
        """The keys that no rule has taken."""
        return [name for name, origin in self._origins.items() if not origin.steps]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
