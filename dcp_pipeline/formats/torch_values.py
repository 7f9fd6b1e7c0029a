"""Values that are no plain tensors, through ``torch.save`` and a guarded ``torch.load``."""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any

import torch

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.formats.value_guard import ValueGlobals, globals_of_value, pickle_of_value
from dcp_pipeline.formats.zip_directory import Window

__all__ = ["check_readable", "loads_weights_only", "read_value", "write_value"]

_INT_BITS = 255 * 8 - 1  # torch's guarded reader knows only the short form of a long integer
_SCALARS = (type(None), bool, float, str, complex, bytes, torch.dtype, torch.device, torch.Size)
_HARMLESS = (bytes, frozenset)
_lock = threading.Lock()


def write_value(value: object) -> bytes:
    """``torch.save(value)`` as bytes.

    Raises:
        UnsupportedLeafError: the value cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickling runs code of any class, which may raise anything
        raise UnsupportedLeafError(
            f"a {_type_name(value)}, which cannot be saved: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def read_value(
    data: bytes | memoryview, *, safe_globals: Sequence[object] = (), trusted: bool = False
) -> object:
    """The value that ``torch.save`` wrote, with tensors on the CPU.

    Args:
        data: the item.
        safe_globals: classes and functions the file may name besides torch's own list.
        trusted: read it as a plain pickle, which can run code.

    Raises:
        FormatError: the item is malformed or truncated.
        UnsafeCheckpointError: it names a global that is not allowed; the message says which. Or it
            asks for memory out of proportion to its bytes.
    """
    wanted = list(safe_globals)
    if not trusted:
        named = _check_item(data, wanted).named
        # torch's guarded reader refuses these two, b"" included, though they only hold data.
        wanted += [kind for kind in _HARMLESS if f"builtins.{kind.__name__}" in named]
    # torch's context manager takes away on exit what the program had allowed for itself.
    allowed = torch.serialization.get_safe_globals()
    added = [entry for entry in wanted if entry not in allowed]
    try:
        if trusted or not added:
            return _load(data, trusted)
        with _lock, torch.serialization.safe_globals(added):  # type: ignore[arg-type]
            return _load(data, trusted)
    except Warning:  # warnings are errors in this process: not the file's fault
        raise
    except Exception as error:
        raise _explain(data, error, wanted, trusted) from error


def check_readable(value: object, safe_globals: Sequence[object] = ()) -> bytes:
    """``write_value(value)``, after making sure that ``read_value`` will accept it.

    Raises:
        UnsupportedLeafError: it would not, or the value cannot be pickled at all.
    """
    plain = _is_plain(value)
    data = write_value(value)
    if plain:
        return data
    try:
        read_value(data, safe_globals=safe_globals)
    except CheckpointError as error:
        raise UnsupportedLeafError(
            f"a {_type_name(value)}, which would not be read back: {error}"
        ) from error
    return data


def loads_weights_only(value: object) -> bool:
    """Whether anybody's ``torch.load(weights_only=True)`` opens a file that holds the value.

    It refuses some that :func:`read_value` takes, such as ``frozenset``.

    Raises:
        UnsupportedLeafError: the value cannot be pickled.
    """
    data = write_value(value)
    try:
        _load(data, False)
    except UnpicklingError:
        return False
    return True


def _load(data: bytes | memoryview, trusted: bool) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)


def _check_item(data: bytes | memoryview, safe_globals: Sequence[object]) -> ValueGlobals:
    """What an item names, if ``torch.load`` makes no more of it than it is worth."""
    view = memoryview(data)
    window = Window(lambda offset, nbytes: bytes(view[offset : offset + nbytes]), len(view))
    pickle = pickle_of_value(window)
    try:
        return globals_of_value(pickle)
    except CheckpointError as error:
        unsafe = _unsafe_globals(data, safe_globals)
        if unsafe:  # which explains what else is odd about it
            raise _not_allowed(", ".join(sorted(unsafe))) from error
        raise


def _explain(
    data: bytes | memoryview, error: Exception, safe_globals: Sequence[object], trusted: bool
) -> CheckpointError:
    text = " ".join(str(error).split())
    if trusted or not isinstance(error, UnpicklingError):
        return FormatError(f"torch.load cannot read an item: {type(error).__name__}: {text}")
    # A pickle may be cut off before its end: torch's message must do.
    unsafe = _unsafe_globals(data, safe_globals) or set(re.findall(r"GLOBAL ([\w.]+)", text))
    refused = re.search(r"(Can only|Trying to|Only persistent).*", text)
    if not unsafe and refused is None:
        return FormatError(f"torch.load cannot read an item: {text}")
    return _not_allowed(", ".join(sorted(unsafe)) if unsafe else str(refused and refused[0]))


def _unsafe_globals(data: bytes | memoryview, safe_globals: Sequence[object]) -> set[str]:
    try:
        unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
    except Exception:  # it is too malformed to tell
        return set()
    return unsafe - {_global_name(entry) for entry in (*safe_globals, *_HARMLESS)}


def _not_allowed(what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"an item asks for {what}, which is not allowed; if you trust the file, name it in "
        "safe_globals, or set trusted: true, which lets the file run code"
    )


def _global_name(entry: Any) -> str:
    if isinstance(entry, tuple):
        return str(entry[1])
    return f"{entry.__module__}.{entry.__qualname__}"


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


_KEYS = (str, bool, float, bytes, type(None))
_KEY_BITS = 60  # integers beyond may have the hash of others
_KEY_PARTS = 16
_FEW_KEYS = 256


def _is_plain_key(key: object, is_one_of_few: bool) -> bool:
    kind = type(key)
    if kind is tuple and is_one_of_few:
        assert isinstance(key, tuple)
        return len(key) <= _KEY_PARTS and all(_is_plain_key(part, False) for part in key)
    return kind in _KEYS or (kind is int and isinstance(key, int) and key.bit_length() <= _KEY_BITS)


def _is_plain(value: object) -> bool:
    """Whether ``value`` is made of nothing but types the guarded reader is known to accept."""
    todo: list[Any] = [value]
    seen: set[int] = set()
    while todo:
        item = todo.pop()
        kind = type(item)
        if kind in _SCALARS:
            continue
        if kind is int:
            if item.bit_length() > _INT_BITS:
                return False
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        if kind is list or kind is tuple:
            todo.extend(item)
        elif kind in (set, frozenset, dict) or (kind is OrderedDict and not vars(item)):
            if not all(_is_plain_key(key, len(item) <= _FEW_KEYS) for key in item):
                return False
            if kind is dict or kind is OrderedDict:
                todo.extend(item.values())
        else:
            return False
    return True
