"""A file of ``torch.save`` that holds a nested state: where its tensors lie, and its other values.

Nothing of it is run. Classes that a trainer is known to leave in its files become
:class:`Unread`, of which at most the attributes are looked at; any other global is refused.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.core.path import Index, Path, dotted
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.pickle_values import Factory, key_types, plain_globals
from dcp_pipeline.formats.torch_zip import (
    MAX_STATE_ENTRIES,
    MAX_STATE_PICKLE_BYTES,
    TENSOR_GLOBALS,
    Archive,
    Rebuilt,
    StorageType,
    StoredTensor,
    check_containers,
    storage_of,
)

__all__ = ["Empty", "Leaf", "TorchTree", "Unread", "parse_tree_zip"]

_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_DEEPEST = 100
_FREE_NODES, _MOST_NODES = 4096, 4_000_000
_MOST_TEXT = 64 << 20
_FREE_ELEMENTS, _ELEMENTS_PER_BYTE = 64 << 20, 16
_KEY_BITS = 62
_KEYS = key_types(StorageType, torch.Size, torch.dtype, frozenset)


@dataclass(eq=False)
class Unread:
    """An object of a class that is not imported.

    Attributes:
        name: the class.
        state: what would be set on it.
    """

    name: str
    state: Any = None


@dataclass(frozen=True)
class Empty:
    """A container that holds nothing: ``dict``, ``list`` or ``tuple``."""

    kind: str


Leaf = StoredTensor | Unread | Empty | Any
"""A tensor, what is not read, an empty mapping, or a Python value."""


@dataclass(frozen=True)
class TorchTree:
    """What a file holds.

    Attributes:
        root: plain containers and values, tensors as :class:`Rebuilt`.
    """

    root: Any
    _archive: Archive

    def locate(self, tensor: object, place: str) -> StoredTensor:
        """Where the elements of a tensor of the tree lie.

        Raises:
            FormatError: it is no tensor, or lies outside of its storage.
            UnsafeCheckpointError: an expanded tensor that would need far more memory than it has.
        """
        found = self._archive.locate(tensor, f", under {place!r}")
        if prod(found.sizes) > _FREE_ELEMENTS + _ELEMENTS_PER_BYTE * found.payload_bytes:
            raise UnsafeCheckpointError(
                f"{found.payload_bytes} bytes claim to be the {prod(found.sizes)} elements of"
                f" {place!r}"
            )
        return found

    def leaves(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
        """Everything in a part of the tree, with its place: mappings are entered, and lists and
        tuples that hold tensors or (lists) mappings.
        """
        if type(value) is Rebuilt:
            yield path, self.locate(value, dotted(path))
        elif isinstance(value, Unread):
            if type(value.state) is dict and value.name in _NAMESPACES:
                yield from self.leaves(value.state, path)
            else:
                yield path, value
        elif isinstance(value, dict) and type(value) is not Counter:
            if not value:
                yield path, Empty("dict")
            elif not all(map(_is_component, value)):
                if _holds_tensors(value):
                    raise FormatError(f"the mapping {dotted(path)!r} has keys that are no names")
                yield path, _without_unread(value)
            else:
                for key, part in value.items():
                    yield from self.leaves(part, (*path, key))
        elif type(value) is list and any(map(_holds_items, value)):
            for position, part in enumerate(value):
                yield from self.leaves(part, (*path, Index(position)))
        elif type(value) is tuple and any(map(_holds_tensors, value)):
            for position, part in enumerate(value):
                yield from self.leaves(part, (*path, Index(position, True)))
        else:
            yield path, _without_unread(value)


_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")


def parse_tree_zip(
    read: Callable[[int, int], bytes], length: int, unread: Sequence[str] = ()
) -> TorchTree:
    """Look into a file that ``torch.save`` (1.6 on) wrote; no element is read.

    Args:
        read: ``(offset, nbytes)`` to bytes of the file.
        length: bytes of it.
        unread: modules whose objects are left out.

    Raises:
        FormatError: malformed, truncated, or of the format before torch 1.6.
        UnsafeCheckpointError: it names another global, or is absurdly large for what it holds.
    """
    if read(0, min(len(_OLD_TORCH), length)) == _OLD_TORCH:
        raise FormatError(
            "it is of the format that torch.save wrote before 1.6, which is one pickle; load it"
            " with torch.load(weights_only=True) and save it again"
        )
    archive = Archive(read, length, MAX_STATE_ENTRIES)
    pickle = archive.pickle(MAX_STATE_PICKLE_BYTES)
    check_containers(pickle, per=4)

    def resolve(module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _KNOWN:
            return _KNOWN[full]
        if any(full == one or full.startswith(f"{one}.") for one in unread):
            return Factory(full, lambda args: Unread(full))
        raise UnsafeCheckpointError(
            f"it asks for {full}, which plain data never needs: nothing that a file names is"
            " imported here. If you trust it, load it with torch.load and save what you need again"
        )

    root = load_inert(
        pickle,
        resolve,
        builders={OrderedDict: lambda made, attributes: None, Unread: _set_state},
        persistent=storage_of,
        keys=_KEYS,
    )
    _measure(root, len(pickle))
    return TorchTree(root, archive)


def _set_state(made: Unread, state: Any) -> None:
    made.state = state


def _measure(root: Any, nbytes: int) -> None:
    """Refuse what is small in the pickle and endless when its shared parts are written out."""
    left = min(_FREE_NODES + nbytes, _MOST_NODES)
    text = 0
    todo = [(root, 0)]
    while todo:
        value, depth = todo.pop()
        left -= 1
        if type(value) in (str, bytes, bytearray):
            text += len(value)
        if depth > _DEEPEST or left < 0 or text > _MOST_TEXT:
            raise UnsafeCheckpointError(
                "a pickle holds itself, or far more by sharing parts than its bytes are worth"
            )
        if isinstance(value, dict):
            todo += [(part, depth + 1) for pair in value.items() for part in pair]
        elif type(value) in (list, tuple, set, frozenset):
            todo += [(part, depth + 1) for part in value]
        elif isinstance(value, Unread):
            todo.append((value.state, depth + 1))


def _is_component(key: object) -> bool:
    if type(key) is int:
        return key.bit_length() <= _KEY_BITS
    if type(key) is str:
        return key.isascii() or key == key.encode("utf-8", "replace").decode()
    return key is None or type(key) in (bool, float)


def _holds_items(value: object) -> bool:
    if isinstance(value, (dict, Unread)):
        return True
    if type(value) is list:
        return any(map(_holds_items, value))
    return _holds_tensors(value)


def _holds_tensors(value: object) -> bool:
    if type(value) is Rebuilt:
        return True
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return type(value) in (list, tuple) and any(map(_holds_tensors, value))  # type: ignore[call-overload]


def _without_unread(value: Any) -> Any:
    """The value, or the first thing in it that cannot be read."""
    todo: list[Any] = [value]
    while todo:
        part = todo.pop()
        if isinstance(part, Factory | StorageType):
            return Unread(part.name if isinstance(part, Factory) else "a class of storages")
        if isinstance(part, Unread | Rebuilt):
            return part if isinstance(part, Unread) else Unread("a tensor as a key")
        if isinstance(part, dict):
            todo += [*part, *part.values()]
        elif type(part) in (list, tuple, set, frozenset):
            todo += part
    return value


def _counter(args: tuple[Any, ...]) -> Counter[Any]:
    counts = args[0] if args else {}
    if type(counts) is not dict or any(type(count) is not int for count in counts.values()):
        raise FormatError("a pickle builds a Counter of something else than counts")
    return Counter(counts)


def _device(args: tuple[Any, ...]) -> torch.device:
    if not args or type(args[0]) is not str or any(type(one) is not int for one in args[1:]):
        raise FormatError("a pickle builds a device of something else than its name and number")
    return torch.device(*args[:2])


def _torch_size(args: tuple[Any, ...]) -> torch.Size:
    sizes = args[0] if args else ()
    if type(sizes) is not tuple or any(type(n) is not int or not 0 <= n < 1 << 62 for n in sizes):
        raise FormatError("a pickle builds a torch.Size of something else than counts")
    return torch.Size(sizes)


def _parameter_with_state(args: tuple[Any, ...]) -> Rebuilt:
    if type(args[0]) is not Rebuilt:
        raise FormatError("a parameter of something that is not a tensor")
    return args[0]


def _with_attributes(args: tuple[Any, ...]) -> object:
    """A tensor with attributes of its own, which are left out."""
    function, kind, arguments = args[0], args[1], args[2]
    if type(function) is not Factory or kind is not _KNOWN["torch.Tensor"]:
        raise UnsafeCheckpointError("a pickle rebuilds a tensor by something unknown")
    made = function.make(arguments) if type(arguments) is tuple else None
    if type(made) is not Rebuilt:
        raise FormatError("a tensor with attributes is no tensor")
    return made


def _known() -> dict[str, object]:
    known = {**TENSOR_GLOBALS, **plain_globals(_KEYS)}
    makers: dict[str, Callable[[tuple[Any, ...]], object]] = {
        "collections.Counter": _counter,
        "torch.Size": _torch_size,
        "torch.device": _device,
        "torch._utils._rebuild_parameter_with_state": _parameter_with_state,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
        "torch.Tensor": lambda args: _refuse(),
    }
    known.update((name, Factory(name, make)) for name, make in makers.items())
    return known


def _refuse() -> object:
    raise UnsafeCheckpointError("a pickle calls torch.Tensor")


_KNOWN = _known()
