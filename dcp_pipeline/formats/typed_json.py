"""Plain Python values as JSON and back, without losing a type, a key or a bit.

What JSON knows is written as JSON; everything else is an object with one key that starts with
``$``: ``(1, 2)`` is ``{"$tuple":[1,2]}``. A dict is a JSON object when all its keys are strings
that do not start with ``$``, and ``{"$dict":[[key,value],...]}`` otherwise.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.core.hashing import EqualHashes
from dcp_pipeline.formats.sharing import LONG_TEXT, Sharing

__all__ = ["canonical", "decode", "encode"]

_MAX_DEPTH = 100  # of values; each is up to three levels of JSON
_MAX_NODES = 20_000_000
_SHARED = frozenset({str, bytes, bytearray, list, tuple, dict, OrderedDict, set, frozenset})
_PLAIN_INT = 1 << 63
_NAN_BITS = "7ff8000000000000"


def encode(value: object) -> bytes:
    """The typed JSON of ``value``, ASCII, the same bytes for the same value.

    Exact types only: ``None``, ``bool``, ``int``, ``float``, ``complex``, ``str``, ``bytes``,
    ``bytearray``, ``list``, ``tuple``, ``dict``, ``OrderedDict``, ``set``, ``frozenset``,
    ``range``, ``slice``, ``torch.Size``, ``torch.dtype``, ``torch.device``.

    Raises:
        UnsupportedLeafError: another type, a value nested more than 100 deep, one that contains
            itself, or one that shares its parts so often that its text would be endless.

    Example:
        >>> encode({"step": 3, "betas": (0.9, 0.999)})
        b'{"step":3,"betas":{"$tuple":[0.9,0.999]}}'
    """
    return _dump(_Encoder().tree(value, 0))


def decode(data: bytes | bytearray | memoryview) -> object:
    """The value that ``encode`` wrote.

    Raises:
        FormatError: it is not typed JSON, or nested too deep.
        UnsafeCheckpointError: keys of it were chosen to have one hash.

    Example:
        >>> decode(b'{"$tuple":[1,2.5]}')
        (1, 2.5)
    """
    try:
        tree = json.loads(
            str(data, "ascii"), object_pairs_hook=_Object, parse_constant=_refuse_constant
        )
        return _value(tree, 0)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise FormatError("typed JSON is nested too deep") from error
    except Exception as error:  # whatever a malformed text makes a constructor raise
        raise FormatError(f"malformed typed JSON: {type(error).__name__}: {error}") from error


def canonical(value: object) -> bytes | None:
    """``encode(value)``, or ``None`` where it cannot be encoded: to compare replicas."""
    try:
        return encode(value)
    except UnsupportedLeafError:
        return None


def _dump(tree: object) -> bytes:
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode("ascii")


class _Encoder:
    """Turns a value into what ``json.dumps`` writes, counting its parts."""

    def __init__(self) -> None:
        self._nodes = 0
        self._sharing = Sharing()

    def tree(self, value: Any, depth: int) -> object:
        self._nodes += 1
        if depth > _MAX_DEPTH:
            raise UnsupportedLeafError(
                f"a value that is nested more than {_MAX_DEPTH} deep, or contains itself"
            )
        if self._nodes > _MAX_NODES:
            raise UnsupportedLeafError(f"a value of more than {_MAX_NODES} parts")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _SHARED:
            self._count(value, kind)
        if kind is str:
            return value if not _has_surrogates(value) else {"$str": _pack_text(value)}
        if kind is int:
            return value if -_PLAIN_INT <= value < _PLAIN_INT else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _float_name(value)}
        if kind is list:
            return [self.tree(item, depth + 1) for item in value]
        if kind is dict:
            return self._dict(value, depth)
        if kind is OrderedDict:
            if vars(value):
                raise UnsupportedLeafError("an OrderedDict with attributes")
            return {"$OrderedDict": self._pairs(value, depth)}
        if kind in (tuple, set, frozenset):
            if kind is not tuple:
                _check_hashes(value)
            items = [self.tree(item, depth + 1) for item in value]
            return {f"${kind.__name__}": items if kind is tuple else sorted(items, key=_dump)}
        return self._rare(value, depth)

    def _count(self, value: Any, kind: type) -> None:
        is_text = kind in (str, bytes, bytearray)
        if is_text and len(value) <= LONG_TEXT:
            return
        try:
            self._sharing.add(value, is_text)
        except UnsafeCheckpointError as error:
            raise UnsupportedLeafError(str(error)) from error

    def _dict(self, value: dict[Any, Any], depth: int) -> object:
        if all(
            type(key) is str and not key.startswith("$") and not _has_surrogates(key)
            for key in value
        ):
            return {key: self.tree(item, depth + 1) for key, item in value.items()}
        return {"$dict": self._pairs(value, depth)}

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[object]:
        _check_hashes(value)
        return [
            [self.tree(key, depth + 1), self.tree(item, depth + 1)] for key, item in value.items()
        ]

    def _rare(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind is bytes or kind is bytearray:
            return {f"${kind.__name__}": base64.b64encode(value).decode("ascii")}
        if kind is complex:
            parts = [self.tree(value.real, depth + 1), self.tree(value.imag, depth + 1)]
            return {"$complex": parts}
        if kind is range or kind is slice:
            bounds = (value.start, value.stop, value.step)
            return {f"${kind.__name__}": [self.tree(bound, depth + 1) for bound in bounds]}
        torch = sys.modules.get("torch")  # a value of torch's cannot be here before torch is
        if torch is not None:
            if kind is torch.Size:
                return {"$torch.Size": list(value)}
            if kind is torch.dtype:
                return {"$torch.dtype": str(value).removeprefix("torch.")}
            if kind is torch.device:
                return {"$torch.device": str(value)}
        raise UnsupportedLeafError(
            f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
            + ", which cannot be written as typed JSON"
        )


def _check_hashes(keys: Iterable[Any]) -> None:
    try:
        EqualHashes().add(keys)
    except UnsafeCheckpointError as error:
        raise UnsupportedLeafError(f"a value that would not be read back: {error}") from error


def _has_surrogates(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _pack_text(text: str) -> str:
    # JSON would join a pair of lone surrogates into one character.
    return base64.b64encode(text.encode("utf-8", "surrogatepass")).decode("ascii")


def _float_name(value: float) -> str:
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    bits = struct.pack(">d", value).hex()
    return "nan" if bits == _NAN_BITS else bits


class _Object(list[tuple[str, Any]]):
    """The pairs of a JSON object, in order, with duplicates."""


def _refuse_constant(name: str) -> object:
    raise FormatError(f"typed JSON with the bare word {name}")


def _value(tree: object, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise FormatError(f"typed JSON is nested more than {_MAX_DEPTH} deep")
    if type(tree) is list:
        return [_value(item, depth + 1) for item in tree]
    if type(tree) is _Object:
        return _object_value(tree, depth)
    if type(tree) is str and _has_surrogates(tree):
        raise FormatError("typed JSON with a lone surrogate outside $str")
    if type(tree) is float and math.isinf(tree):
        raise FormatError("typed JSON with a number that no float holds")
    return tree


def _object_value(tree: _Object, depth: int) -> Any:
    if len(tree) == 1 and tree[0][0].startswith("$"):
        tag, body = tree[0]
        reader = _READERS.get(tag)
        if reader is None:
            raise FormatError(f"typed JSON with the unknown tag {tag[:80]!r}")
        return reader(body, depth)
    result = {key: _value(item, depth + 1) for key, item in tree}
    if len(result) != len(tree):
        raise FormatError("typed JSON names a key twice")
    if any(key.startswith("$") or _has_surrogates(key) for key in result):
        raise FormatError("typed JSON with a tag beside other keys")
    return result


def _items(body: object, depth: int, count: int | None = None) -> list[Any]:
    if type(body) is not list or (count is not None and len(body) != count):
        raise FormatError(f"typed JSON with a {type(body).__name__} where a list is due")
    return [_value(item, depth + 1) for item in body]


def _text(body: object) -> str:
    if type(body) is not str:
        raise FormatError(f"typed JSON with a {type(body).__name__} where text is due")
    return body


def _bytes(body: object) -> bytes:
    try:
        return base64.b64decode(_text(body), validate=True)
    except binascii.Error as error:
        raise FormatError(f"typed JSON with malformed base64: {error}") from error


def _int(body: object) -> int:
    value = int(_text(body), 16)
    if hex(value) != body:
        raise FormatError("typed JSON with a malformed integer")
    return value


def _float(body: object) -> float:
    text = _text(body)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    if not math.isnan(value) or len(text) != 16:
        raise FormatError("typed JSON with a malformed float")
    return value


def _complex(body: object, depth: int) -> complex:
    real, imaginary = _items(body, depth, 2)
    if type(real) is not float or type(imaginary) is not float:
        raise FormatError("typed JSON with a complex number of something else than floats")
    return complex(real, imaginary)


def _pairs(body: object, depth: int) -> list[tuple[Any, Any]]:
    pairs = [_items(pair, depth, 2) for pair in body] if type(body) is list else _items(body, depth)
    return [(key, value) for key, value in pairs]


def _dict(kind: Callable[[list[tuple[Any, Any]]], Any]) -> Callable[[object, int], Any]:
    def read(body: object, depth: int) -> Any:
        pairs = _pairs(body, depth)
        EqualHashes().add(key for key, _ in pairs)
        result = kind(pairs)
        if len(result) != len(pairs):
            raise FormatError("typed JSON names a key twice")
        return result

    return read


def _set(kind: type) -> Callable[[object, int], Any]:
    def read(body: object, depth: int) -> Any:
        items = _items(body, depth)
        EqualHashes().add(items)
        result = kind(items)
        if len(result) != len(items):
            raise FormatError("typed JSON names an item of a set twice")
        return result

    return read


def _range(body: object, depth: int) -> range:
    bounds = _items(body, depth, 3)
    if any(type(bound) is not int for bound in bounds):
        raise FormatError("typed JSON with a range of something else than integers")
    return range(*bounds)


def _size(body: object, depth: int) -> object:
    import torch

    counts = _items(body, depth)
    if any(type(count) is not int for count in counts):
        raise FormatError("typed JSON with a size of something else than integers")
    return torch.Size(counts)


def _dtype(body: object, depth: int) -> object:
    import torch

    dtype = vars(torch).get(_text(body))  # not getattr, which may import a module of torch's
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"typed JSON with the unknown dtype {str(body)[:80]!r}")
    return dtype


def _device(body: object, depth: int) -> object:
    import torch

    return torch.device(_text(body))


_READERS: dict[str, Callable[[object, int], Any]] = {
    "$OrderedDict": _dict(OrderedDict),
    "$bytearray": lambda body, depth: bytearray(_bytes(body)),
    "$bytes": lambda body, depth: _bytes(body),
    "$complex": _complex,
    "$dict": _dict(dict),
    "$float": lambda body, depth: _float(body),
    "$frozenset": _set(frozenset),
    "$int": lambda body, depth: _int(body),
    "$range": _range,
    "$set": _set(set),
    "$slice": lambda body, depth: slice(*_items(body, depth, 3)),
    "$str": lambda body, depth: _bytes(body).decode("utf-8", "surrogatepass"),
    "$torch.Size": _size,
    "$torch.device": _device,
    "$torch.dtype": _dtype,
    "$tuple": lambda body, depth: tuple(_items(body, depth)),
}
