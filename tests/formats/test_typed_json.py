"""Typed JSON keeps every type, key and bit; what it cannot keep it refuses by name."""

import enum
import math
import random
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsupportedLeafError
from dcp_pipeline.formats.typed_json import canonical, decode, encode

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def typed(value: object) -> object:
    """``value`` with the type of every part, the bits of floats, and sets without an order."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, complex):
        return complex, typed(value.real), typed(value.imag)
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(typed(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), repr(value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from([torch.float32, torch.Size([1, 2]), torch.device("cuda:1"), "$tuple"])
)
keys = st.recursive(
    scalars, lambda inner: st.tuples(inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
values = st.recursive(
    keys | st.binary().map(bytearray) | st.just(range(1, 9, 2)) | st.just(slice(None, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=400, deadline=None)
def test_round_trip(value):
    data = encode(value)
    found = decode(data)
    assert typed(found) == typed(value)
    assert encode(found) == data == canonical(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, b"null"),
        ([1, 2.5, "a", True], b'[1,2.5,"a",true]'),
        ({"a": {"b": []}}, b'{"a":{"b":[]}}'),
        (-0.0, b"-0.0"),
        ((1, (2,)), b'{"$tuple":[1,{"$tuple":[2]}]}'),
        ({1: "c", "1": "b"}, b'{"$dict":[[1,"c"],["1","b"]]}'),
        ({True: "c", "1": "b"}, b'{"$dict":[[true,"c"],["1","b"]]}'),
        ({"$x": 1}, b'{"$dict":[["$x",1]]}'),
        (OrderedDict(b=1, a=2), b'{"$OrderedDict":[["b",1],["a",2]]}'),
        ({3, 1, 2}, b'{"$set":[1,2,3]}'),
        (math.inf, b'{"$float":"inf"}'),
        (math.nan, b'{"$float":"nan"}'),
        (2**64, b'{"$int":"0x10000000000000000"}'),
        (-(2**63), b"-9223372036854775808"),
        (b"\0\xff", b'{"$bytes":"AP8="}'),
        (bytearray(b"a"), b'{"$bytearray":"YQ=="}'),
        (1 - 2j, b'{"$complex":[1.0,-2.0]}'),
        (torch.Size([2, 3]), b'{"$torch.Size":[2,3]}'),
        (torch.bfloat16, b'{"$torch.dtype":"bfloat16"}'),
        (torch.device("cuda", 1), b'{"$torch.device":"cuda:1"}'),
        (range(3), b'{"$range":[0,3,1]}'),
        ("é", b'"\\u00e9"'),
        ("\ud83d\ude00", b'{"$str":"7aC97biA"}'),
        ("\U0001f600", b'"\\ud83d\\ude00"'),
    ],
)
def test_text(value, text):
    assert encode(value) == text
    assert typed(decode(text)) == typed(value)


def test_huge_integers_and_sets_have_one_text():
    assert decode(encode(7**20_000)) == 7**20_000
    names = [f"name {n}" for n in range(100)]
    assert encode(set(names)) == encode(set(reversed(names)))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Point(1, 2), "Point"),
        ([Colour.RED], "Colour"),
        ({"a": Counter()}, "Counter"),
        (object(), "object"),
        (torch.ones(1), "torch.Tensor"),
        ({Point(1, 2): 1}, "Point"),
        (torch.strided, "layout"),
    ],
)
def test_other_types_are_refused_by_name(value, named):
    with pytest.raises(UnsupportedLeafError, match=named):
        encode(value)
    assert canonical(value) is None


def test_depth():
    value: object = 1
    for _ in range(100):
        value = (value,)
    assert decode(encode(value)) == value
    with pytest.raises(UnsupportedLeafError, match="100 deep"):
        encode([value])
    loop: list[object] = []
    loop.append(loop)
    assert canonical(loop) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "malformed"),
        (b"{", "malformed"),
        (b"NaN", "bare word NaN"),
        (b"[Infinity]", "bare word"),
        (b"1e999", "no float"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"$tuple":[1],"a":2}', "beside"),
        (b'{"$nothing":1}', "unknown tag"),
        (b'{"$tuple":1}', "list is due"),
        (b'{"$bytes":"!"}', "base64"),
        (b'{"$bytes":1}', "text is due"),
        (b'{"$int":"12"}', "integer"),
        (b'{"$float":"0000000000000000"}', "float"),
        (b'{"$float":"1.5"}', "malformed"),
        (b'{"$complex":[1,2]}', "floats"),
        (b'{"$dict":[[1,2],[1,3]]}', "twice"),
        (b'{"$dict":[[1,2],[true,3]]}', "twice"),
        (b'{"$dict":[[[],2]]}', "unhashable"),
        (b'{"$dict":[[1]]}', "list is due"),
        (b'{"$dict":"ab"}', "list is due"),
        (b'{"$set":[1,1]}', "twice"),
        (b'{"$torch.dtype":"nn"}', "unknown dtype"),
        (b'{"$torch.dtype":"_dynamo"}', "unknown dtype"),
        (b'{"$torch.device":"nowhere"}', "malformed"),
        (b'{"$torch.Size":["a"]}', "integers"),
        (b'{"$range":[0,1,0]}', "malformed"),
        (b'"\\ud800"', "lone surrogate"),
        ('"é"'.encode(), "malformed"),
        (b"1" * 10_000, "malformed"),
        (b"[" * 1_000_000, "too deep"),
        (b"[" * 150 + b"]" * 150, "100 deep"),
        (b'{"$tuple":[' * 150 + b"]}" * 150, "100 deep"),
    ],
)
def test_malformed_text_is_refused(text, said):
    with pytest.raises(FormatError, match=said):
        decode(text)


def test_changed_bytes_never_escape():
    rng = random.Random(11)
    value = {"a": (1, 2.5, b"xyz"), 3: [{1, 2}, 2**70, math.nan], "d": torch.float16}
    item = encode(value)
    for _ in range(4000):
        changed = bytearray(item)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(len(item))] = rng.randrange(32, 128)
        try:
            decode(bytes(changed))
        except CheckpointError:
            pass


def test_torch_is_not_imported():
    code = (
        "import sys; from dcp_pipeline.formats import typed_json, safetensors; "
        "assert typed_json.decode(typed_json.encode((1, {2: b'x'}))) == (1, {2: b'x'}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
