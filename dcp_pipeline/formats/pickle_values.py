"""What a pickle may be made of when nothing of it may run: factories, keys, plain containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.hashing import EqualHashes

__all__ = ["Factory", "Keys", "check_key", "key_types", "plain_globals"]

_KEY_NODES = 256
_KEY_INT_BITS = 256
_FEW = 512  # so few keys may all have one hash


class Factory:
    """What a global of a pickle stands for: a name, and a function that makes data of arguments.

    Args:
        name: the global, as errors show it.
        make: called with the tuple of arguments of REDUCE or NEWOBJ; must not run code of the file.
        of_counts: its one argument is a tuple of small integers and its results are immutable, so
            that equal ones may be one object.
    """

    __slots__ = ("make", "name", "of_counts")

    def __init__(
        self, name: str, make: Callable[[tuple[Any, ...]], object], of_counts: bool = False
    ) -> None:
        self.name = name
        self.make = make
        self.of_counts = of_counts


def key_types(*more: type) -> frozenset[type]:
    """The types whose instances may be dict keys or set items; tuples of them may be too."""
    return frozenset((str, int, bool, float, bytes, complex, type(None), *more))


def check_key(key: object, allowed: frozenset[type]) -> None:
    """Refuse what must not be hashed: other types, tuples nested or long beyond reason."""
    todo, seen = [key], 0
    while todo:
        item = todo.pop()
        seen += 1
        if seen > _KEY_NODES:
            raise UnsafeCheckpointError("a pickle uses an absurdly nested tuple as a key")
        if type(item) is tuple:
            todo.extend(item[: _KEY_NODES + 1])
        elif type(item) not in allowed:
            raise FormatError(f"a pickle uses a {type(item).__name__} as a key")
        elif type(item) is int and item.bit_length() > _KEY_INT_BITS:
            raise UnsafeCheckpointError("a pickle uses an absurdly long integer as a key")


class Keys:
    """Looks at the keys of a pickle before they are put into dicts and sets.

    Args:
        allowed: types, see ``key_types``.
    """

    def __init__(self, allowed: frozenset[type]) -> None:
        self._allowed = allowed
        self._of: dict[int, tuple[Collection[Any], EqualHashes]] = {}

    def check(self, target: Collection[Any] | None, keys: Sequence[Any]) -> None:
        """Refuse keys that must not be hashed, or too many that have one hash.

        Args:
            target: what they are put into, ``None`` for something new. Keys that are text need not
                be looked at.
        """
        for key in keys:
            check_key(key, self._allowed)
        if len(target or ()) + len(keys) <= _FEW:
            return
        if target is None:
            EqualHashes().add(keys)
            return
        known = self._of.get(id(target))
        if known is None:
            known = self._of[id(target)] = (target, EqualHashes())
            known[1].add(target)
        known[1].add(keys)


def plain_globals(allowed: frozenset[type]) -> dict[str, object]:
    """The globals that pickle writes for plain containers, by ``module.name``."""

    def make_set(kind: type) -> Callable[[tuple[Any, ...]], object]:
        def make(args: tuple[Any, ...]) -> object:
            items = args[0] if args else ()
            if type(items) not in (list, tuple, set) or len(args) > 1:
                raise FormatError(f"a pickle builds a {kind.__name__} of {type(items).__name__}")
            Keys(allowed).check(None, list(items))
            return kind(items)

        return make

    def make_ordered(args: tuple[Any, ...]) -> object:
        pairs = [(pair[0], pair[1]) for pair in args[0]] if args else []
        Keys(allowed).check(None, [key for key, _ in pairs])
        return OrderedDict(pairs)

    def make_bytes(args: tuple[Any, ...]) -> bytes:
        text, coding = args if args else ("", "latin1")
        if type(text) is not str or coding not in ("latin1", "latin-1"):
            raise FormatError("a pickle encodes something that is not the bytes of pickle")
        return text.encode("latin-1")

    def make_complex(args: tuple[Any, ...]) -> complex:
        if len(args) != 2 or any(type(part) not in (int, float) for part in args):
            raise FormatError("a pickle builds a complex number of something else than two numbers")
        return complex(args[0], args[1])

    makers: dict[str, Callable[[tuple[Any, ...]], object]] = {
        "builtins.set": make_set(set),
        "builtins.frozenset": make_set(frozenset),
        "builtins.complex": make_complex,
        "builtins.bytes": lambda args: make_bytes(args) if args else b"",
        "collections.OrderedDict": make_ordered,
        "_codecs.encode": make_bytes,
    }
    return {name: Factory(name, make) for name, make in makers.items()}
