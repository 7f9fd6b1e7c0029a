"""A pickle interpreter that can build data and nothing else.

``pickle.Unpickler`` with a strict ``find_class`` is not enough for a hostile file: a memo index
makes CPython allocate gigabytes, and hashing a tuple nested a million times deep, or one that
doubles sixty times, crashes or hangs the process. This interpreter grows its memo by one, looks at
every key before it is hashed, and calls only what the caller's ``resolve`` handed out.
"""

from __future__ import annotations

import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pickletools import opcodes
from typing import Any

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.formats.pickle_values import Factory, Keys, key_types

__all__ = ["load_inert"]

_INT8, _UINT16, _INT32, _UINT32 = (struct.Struct(f).unpack_from for f in ("<B", "<H", "<i", "<I"))
_UINT64, _FLOAT = (struct.Struct(f).unpack_from for f in ("<Q", ">d"))


def load_inert(
    data: bytes,
    resolve: Callable[[str, str], object],
    *,
    builders: Mapping[type, Callable[[Any, Any], None]] | None = None,
    persistent: Callable[[object], object] | None = None,
    keys: frozenset[type] | None = None,
) -> object:
    """Interpret a binary pickle (protocol 2 to 5) without running anything it asks for.

    Args:
        data: the pickle.
        resolve: ``(module, name)`` to a ``Factory`` or to a finished value; it raises
            ``UnsafeCheckpointError`` for a name that is not admitted.
        builders: how the state of BUILD is set on an instance, by its exact type.
        persistent: what a persistent id stands for; without it they are refused.
        keys: the types of dict keys and set items, see ``key_types``.

    Raises:
        FormatError: the pickle is malformed.
        UnsafeCheckpointError: it asks for a global, an opcode or a size that data never needs.

    Example:
        >>> import pickle
        >>> load_inert(pickle.dumps({"a": (1, 2.5)}), lambda module, name: None)
        {'a': (1, 2.5)}
    """
    try:
        return _run(data, resolve, builders or {}, persistent, Keys(keys or key_types()))
    except CheckpointError:
        raise
    except RecursionError as error:
        raise UnsafeCheckpointError("a pickle is nested absurdly deep") from error
    except Exception as error:  # whatever a malformed stream makes the loop trip over
        raise FormatError(f"malformed pickle: {type(error).__name__}: {error}") from error


def _run(
    data: bytes,
    resolve: Callable[[str, str], object],
    builders: Mapping[type, Callable[[Any, Any], None]],
    persistent: Callable[[object], object] | None,
    keys: Keys,
) -> object:
    # One long chain of branches, commonest opcodes first: a checkpoint of 300,000 chunks has
    # twenty million opcodes, and a call for each of them would double the time.
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: list[Any] = []  # picklers number what they put there without gaps
    made: dict[tuple[Factory, bytes], tuple[Any, Any]] = {}
    found: dict[tuple[str, str], object] = {}
    pos = 0
    while True:
        op = data[pos]
        pos += 1
        if op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
            if op == 0x68:
                value = memo[data[pos]]
                pos += 1
            else:
                value = memo[_UINT32(data, pos)[0]]
                pos += 4
            if type(value) is Factory and value.of_counts:
                value, pos = _call_with_counts(value, data, pos, memo, made)
            stack.append(value)
        elif op == 0x4B:  # BININT1
            stack.append(data[pos])
            pos += 1
        elif op == 0x72:  # LONG_BINPUT
            _put(memo, _UINT32(data, pos)[0], stack[-1])
            pos += 4
        elif op == 0x86:  # TUPLE2
            last = stack.pop()
            stack[-1] = (stack[-1], last)
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x52 or op == 0x81:  # REDUCE, NEWOBJ
            arguments = stack.pop()
            factory = stack[-1]
            if type(factory) is not Factory:
                raise UnsafeCheckpointError(f"a pickle calls a {type(factory).__name__}")
            if type(arguments) is not tuple:
                raise FormatError(f"a pickle calls {factory.name} without a tuple of arguments")
            stack[-1] = factory.make(arguments)
        elif op == 0x4D:  # BININT2
            stack.append(_UINT16(data, pos)[0])
            pos += 2
        elif op == 0x8C:  # SHORT_BINUNICODE
            end = pos + 1 + data[pos]
            stack.append(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
            pos = end
        elif op == 0x28:  # MARK
            outer.append(stack)
            stack = []
        elif op == 0x75:  # SETITEMS
            items = stack
            stack = outer.pop()
            target = _dict_of(stack[-1])
            if len(items) % 2:
                raise FormatError("a pickle sets a key without a value")
            others = [key for key in items[::2] if type(key) is not str]
            if others:
                keys.check(target, others)
            target.update(zip(items[::2], items[1::2], strict=True))
        elif op == 0x62:  # BUILD
            state = stack.pop()
            build = builders.get(type(stack[-1]))
            if build is None:
                raise UnsafeCheckpointError(
                    f"a pickle sets the state of a {type(stack[-1]).__name__}"
                )
            build(stack[-1], state)
        elif op == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif op == 0x29:  # EMPTY_TUPLE
            if data[pos : pos + 5] == b"\x81\x94}\x94(" and type(stack[-1]) is Factory:
                # A new instance and the start of its state, five opcodes more.
                value, state = stack[-1].make(()), {}
                stack[-1:] = (value, state)
                memo += (value, state)
                outer.append(stack)
                stack = []
                pos += 5
            else:
                stack.append(())
        elif op == 0x4A:  # BININT
            stack.append(_INT32(data, pos)[0])
            pos += 4
        elif op == 0x71:  # BINPUT
            _put(memo, data[pos], stack[-1])
            pos += 1
        elif op == 0x58:  # BINUNICODE
            end = pos + 4 + _UINT32(data, pos)[0]
            _check_end(end, data)
            stack.append(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
            pos = end
        elif op == 0x8A:  # LONG1
            end = pos + 1 + data[pos]
            _check_end(end, data)
            stack.append(int.from_bytes(data[pos + 1 : end], "little", signed=True))
            pos = end
        elif op == 0x87:  # TUPLE3
            stack[-3:] = [tuple(stack[-3:])] if len(stack) >= 3 else _underflow()
        elif op == 0x74:  # TUPLE
            items = stack
            stack = outer.pop()
            stack.append(tuple(items))
        elif op == 0x61:  # APPEND
            last = stack.pop()
            _list_of(stack[-1]).append(last)
        elif op == 0x65:  # APPENDS
            items = stack
            stack = outer.pop()
            _list_of(stack[-1]).extend(items)
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x88:  # NEWTRUE
            stack.append(True)
        elif op == 0x89:  # NEWFALSE
            stack.append(False)
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x73:  # SETITEM
            last = stack.pop()
            key = stack.pop()
            target = stack[-1]
            keys.check(target if isinstance(target, dict) else None, (key,))
            _dict_of(target)[key] = last
        elif op == 0x93 or op == 0x63:  # STACK_GLOBAL, GLOBAL
            if op == 0x93:
                name = stack.pop()
                module = stack.pop()
            else:
                first = data.index(b"\n", pos)
                second = data.index(b"\n", first + 1)
                module, name = data[pos:first].decode(), data[first + 1 : second].decode()
                pos = second + 1
            if type(name) is not str or type(module) is not str:
                raise FormatError("a pickle names a global by something that is not text")
            wanted = ("builtins" if module == "__builtin__" else module, name)
            if wanted not in found:
                found[wanted] = resolve(*wanted)
            stack.append(found[wanted])
        elif op == 0x47:  # BINFLOAT
            stack.append(_FLOAT(data, pos)[0])
            pos += 8
        elif op == 0x51:  # BINPERSID
            if persistent is None:
                raise UnsafeCheckpointError("a pickle refers to an object outside itself")
            stack.append(persistent(stack.pop()))
        elif op == 0x90:  # ADDITEMS
            items = stack
            stack = outer.pop()
            if type(stack[-1]) is not set:
                raise FormatError("a pickle adds items to something that is not a set")
            keys.check(stack[-1], items)
            stack[-1].update(items)
        elif op == 0x95:  # FRAME
            pos += 8
        elif op == 0x80:  # PROTO
            if not 2 <= data[pos] <= 5:
                raise FormatError(f"a pickle of protocol {data[pos]}, expected 2 to 5")
            pos += 1
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or outer:
                raise FormatError("a pickle stops in the middle of a value")
            return stack[0]
        elif op == 0x91:  # FROZENSET
            items = stack
            stack = outer.pop()
            keys.check(None, items)
            stack.append(frozenset(items))
        elif op == 0x8F:  # EMPTY_SET
            stack.append(set())
        elif op == 0x30:  # POP
            if stack:
                stack.pop()
            else:
                stack = outer.pop()
        elif op == 0x31:  # POP_MARK
            stack = outer.pop()
        elif op == 0x32:  # DUP
            stack.append(stack[-1])
        elif op in _SIZED:
            value, pos = _sized(op, data, pos)
            stack.append(value)
        else:
            _refuse_opcode(op)


_OPCODES = {opcode.code: opcode.name for opcode in opcodes}
_SIZED = {
    0x42: _UINT32,  # BINBYTES
    0x43: _INT8,  # SHORT_BINBYTES
    0x55: _INT8,  # SHORT_BINSTRING, which Python 2 wrote
    0x8B: _UINT32,  # LONG4
    0x8D: _UINT64,  # BINUNICODE8
    0x8E: _UINT64,  # BINBYTES8
    0x96: _UINT64,  # BYTEARRAY8
}


def _put(memo: list[Any], index: int, value: Any) -> None:
    if index == len(memo):
        memo.append(value)
    elif index < len(memo):
        memo[index] = value
    else:
        raise FormatError(f"a pickle puts into slot {index} of {len(memo)}")


_COUNTS = rb"(\(?)((?:K.|M..|J...[\x00-\x7f])*+)([\x85-\x87t])"
_CALL = re.compile(_COUNTS + rb"\x94\x85\x94R\x94", re.DOTALL)
_CALL_2 = re.compile(_COUNTS + rb"r(....)\x85r(....)Rr(....)", re.DOTALL)


def _call_with_counts(
    factory: Factory,
    data: bytes,
    pos: int,
    memo: list[Any],
    made: dict[tuple[Factory, bytes], tuple[Any, Any]],
) -> tuple[Any, int]:
    """``factory`` called in one step, nine opcodes, where the pickle goes on as picklers do.

    Half of the opcodes of ``.metadata`` make sizes, and most of those are the same few.
    """
    match = _CALL.match(data, pos) or _CALL_2.match(data, pos)
    if match is None:
        return factory, pos
    mark, packed, end = match.group(1, 2, 3)
    known = made.get((factory, packed))
    if known is None:
        counts = _counts(packed)
        known = made[factory, packed] = counts, factory.make((counts,))
    counts, result = known
    if bool(mark) != (end == b"t") or (not mark and len(counts) != end[0] - 0x84):
        return factory, pos
    if match.re is _CALL:
        memo += (counts, (counts,), result)
    else:
        for packed_index, value in zip(
            match.group(4, 5, 6), (counts, (counts,), result), strict=True
        ):
            _put(memo, int.from_bytes(packed_index, "little"), value)
    return result, match.end()


def _counts(packed: bytes) -> tuple[int, ...]:
    counts, pos = [], 0
    while pos < len(packed):
        end = pos + 1 + {0x4B: 1, 0x4D: 2, 0x4A: 4}[packed[pos]]
        counts.append(int.from_bytes(packed[pos + 1 : end], "little"))
        pos = end
    return tuple(counts)


def _sized(op: int, data: bytes, pos: int) -> tuple[object, int]:
    width = 1 if op in (0x43, 0x55) else 4 if op in (0x42, 0x8B) else 8
    start = pos + width
    end = start + _SIZED[op](data, pos)[0]
    _check_end(end, data)
    body = data[start:end]
    if op == 0x8B:
        return int.from_bytes(body, "little", signed=True), end
    if op == 0x8D:
        return str(body, "utf-8", "surrogatepass"), end
    if op == 0x55:
        return body.decode("ascii"), end
    return bytearray(body) if op == 0x96 else body, end


def _check_end(end: int, data: bytes) -> None:
    if end > len(data):
        raise FormatError(f"a pickle of {len(data)} bytes asks for bytes up to {end}")


def _dict_of(target: Any) -> dict[Any, Any]:
    if type(target) is not dict and type(target) is not OrderedDict:
        raise FormatError(f"a pickle sets items of a {type(target).__name__}")
    return target


def _list_of(target: Any) -> list[Any]:
    if type(target) is not list:
        raise FormatError(f"a pickle appends to a {type(target).__name__}")
    return target


def _underflow() -> list[Any]:
    raise FormatError("a pickle takes more from its stack than it put there")


def _refuse_opcode(op: int) -> None:
    known = _OPCODES.get(chr(op))
    if known is None:
        raise FormatError(f"a pickle holds the byte 0x{op:02x}, which is no opcode")
    raise UnsafeCheckpointError(f"a pickle uses {known}, which no checkpoint needs")
