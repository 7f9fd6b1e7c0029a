"""Where a leaf lies in a nested state: typed paths and the dotted names made of them.

A path tells ``{"a": {0: x}}`` from ``{"a": {"0": x}}`` and from ``{"a": [x]}``; the dotted name,
DCP's own, is ``a.0`` for all three. Paths are what is compared; names are what is shown and stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.hashing import EqualHashes

__all__ = [
    "Component",
    "Index",
    "Path",
    "assign_names",
    "check_paths",
    "contradictions",
    "decode_path",
    "dotted",
    "encode_path",
]

_DEEPEST: Final = 512
_SHORT_LIST: Final = 1024
_MAX_POSITIONS: Final = 1 << 20


class Index(NamedTuple):
    """A position in a list or a tuple."""

    position: int
    is_tuple: bool = False


Component = str | int | float | bool | None | Index
Path = tuple[Component, ...]


def dotted(path: Path) -> str:
    """The name DCP gives to ``path``: its components joined by dots.

    >>> dotted(("model", Index(3), "weight"))
    'model.3.weight'
    """
    try:
        return ".".join(path)  # type: ignore[arg-type]
    except TypeError:
        # Some of them are no strings.
        parts = (str(part.position) if isinstance(part, Index) else str(part) for part in path)
        return ".".join(parts)


def encode_path(path: Path) -> list[object]:
    """Path as JSON: a mapping's key as itself, a list index as ``[i]``, a tuple's as ``[i, 1]``."""
    return [_encode(part) for part in path]


def _encode(part: Component) -> object:
    if isinstance(part, Index):
        return [part.position, 1] if part.is_tuple else [part.position]
    if isinstance(part, float):
        return {"float": repr(part)}
    return part


def decode_path(encoded: object) -> Path:
    """The inverse of :func:`encode_path`.

    Raises:
        FormatError: the value is not an encoded path.
    """
    if not isinstance(encoded, list):
        raise FormatError(f"a path is a JSON array, found {type(encoded).__name__}")
    return tuple(_decode(part) for part in encoded)


def _decode(part: object) -> Component:
    if part is None or isinstance(part, (str, bool, int)):
        return part
    if isinstance(part, list) and part and all(type(item) is int for item in part) and part[0] >= 0:
        return Index(part[0], len(part) > 1)
    if isinstance(part, dict) and isinstance(part.get("float"), str):
        return float(part["float"])
    raise FormatError(f"not a component of a path: {part!r}")


def sort_key(path: Path) -> tuple[tuple[str, str], ...]:
    """Total order over paths whose components are of different types."""
    return tuple((type(part).__name__, str(part)) for part in path)


def assign_names(paths: Iterable[Path]) -> list[str]:
    """Dotted names for ``paths``, with a suffix where two paths would share one.

    The result for a set of paths does not depend on their order, so that every save of the same
    state uses the same names.
    """
    listed = list(paths)
    names = [dotted(path) for path in listed]
    if len(set(names)) == len(names):
        return names
    taken = set(names)
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        groups.setdefault(name, []).append(position)
    for name, members in groups.items():
        members.sort(key=lambda position: sort_key(listed[position]))
        for position in members[1:]:
            number = 1
            while f"{name}#{number}" in taken:
                number += 1
            names[position] = f"{name}#{number}"
            taken.add(names[position])
    return names


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse paths of a file that no state has, before anything is built of them.

    Raises:
        FormatError: two are the same.
        UnsafeCheckpointError: they are nested absurdly deep, have keys that were chosen to have one
            hash, or positions in lists that would have to be filled up with far more than there is.
    """
    if max(map(len, paths), default=0) > _DEEPEST:
        raise UnsafeCheckpointError(f"a key lies more than {_DEEPEST} levels deep")
    hashes = EqualHashes()
    lengths: dict[Path, int] = {}
    for path in paths:
        if all(type(part) is str for part in path):
            continue  # which is hashed with a secret
        hashes.add(path[:depth] for depth in range(1, len(path) + 1))
        for depth, part in enumerate(path):
            if isinstance(part, Index) and part.position >= _SHORT_LIST:
                before = path[:depth]
                lengths[before] = max(lengths.get(before, 0), part.position)
    if sum(lengths.values()) > _MAX_POSITIONS + 64 * len(paths):
        raise UnsafeCheckpointError(
            f"lists of {sum(lengths.values())} entries are to be made for {len(paths)} keys"
        )
    if len(set(paths)) != len(paths):
        raise FormatError("two keys lie at one place")


def contradictions(paths: Iterable[Path]) -> list[str]:
    """What keeps ``paths`` from lying in one nested state, in words.

    >>> contradictions([("a",), ("a", "b"), ("c", Index(0)), ("c", "d")])
    ["'a.b' lies inside another value", "'c' has positions and names"]
    """
    listed = list(paths)
    leaves, inner, found = set(listed), dict[Path, bool](), list[str]()
    if len(leaves) < len(listed):
        found.append("two keys lie at one place")
    for path in listed:
        for depth, part in enumerate(path):
            above = path[:depth]
            if above in leaves:
                found.append(f"{dotted(path)!r} lies inside another value")
            elif inner.setdefault(above, isinstance(part, Index)) != isinstance(part, Index):
                found.append(f"{dotted(above)!r} has positions and names")
    return list(dict.fromkeys(found))


def is_prefix(prefix: Sequence[Component], path: Path) -> bool:
    """Whether ``path`` lies at or below ``prefix``."""
    return path[: len(prefix)] == tuple(prefix)
