"""States that look at the checkpoint before they say what they want of it.

A template is usually as it is: what it holds is read. Some parts of a state only know once they
see what is stored: which parameters an optimizer had state for, or under which of several spellings
a name was saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path, is_prefix
from dcp_pipeline.core.table import KeySpec

__all__ = ["Fit", "FittingState", "Stored"]


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds below a place of the state.

    Attributes:
        keys: path from there to what is stored.
        empty: paths from there of mappings and lists that hold nothing.
    """

    keys: Mapping[Path, KeySpec]
    empty: frozenset[Path] = frozenset()

    @classmethod
    def below(cls, path: Path, manifest: Manifest) -> Stored:
        """What ``manifest`` has below ``path``."""
        depth = len(path)
        keys = {
            spec.path[depth:]: spec for spec in manifest.table.keys if is_prefix(path, spec.path)
        }
        empty = (found for found, _ in manifest.empty if is_prefix(path, found))
        return cls(keys, frozenset(found[depth:] for found in empty))


@dataclass
class Fit:
    """How a part of a template is changed to fit what is stored. All paths begin at the part.

    Attributes:
        made: further leaves. A tensor is filled and put there; ``None`` takes whatever is stored.
        dropped: what is not asked for, with all below it; it keeps its value.
        put: what is put somewhere without being read.
        removed: what leaves its mapping or list once all is read; of a list, the last entries.
        renamed: where a leaf is found in the checkpoint, if not at its own path.
    """

    made: dict[Path, Any] = field(default_factory=dict)
    dropped: list[Path] = field(default_factory=list)
    put: dict[Path, Any] = field(default_factory=dict)
    removed: list[Path] = field(default_factory=list)
    renamed: dict[Path, Path] = field(default_factory=dict)

    def of(self, takes_part: Callable[[Path], bool]) -> Fit:
        """The same for a load that leaves out some places."""
        return Fit(
            {path: value for path, value in self.made.items() if takes_part(path)},
            [path for path in self.dropped if takes_part(path)],
            {path: value for path, value in self.put.items() if takes_part(path)},
            [path for path in self.removed if takes_part(path)],
            self.renamed,
        )


class FittingState(dict[Any, Any], ABC):
    """A mapping that is a part of a state, and adapts to a checkpoint that is loaded into it.

    Copies of it are dicts without that ability, which ``torch.load`` reads with ``weights_only``.
    """

    @abstractmethod
    def fit(self, stored: Stored) -> Fit:
        """What is to be changed in a template that has this part; nothing is changed yet."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)

    copy = __copy__
