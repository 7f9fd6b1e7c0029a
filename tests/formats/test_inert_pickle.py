"""The interpreter agrees with pickle about data, and survives what makes pickle crash."""

import pickle
import pickletools
import struct
from collections import OrderedDict

import pytest
from hypothesis import given, settings, strategies as st

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.formats.inert_pickle import load_inert
from dcp_pipeline.formats.pickle_values import Factory, key_types, plain_globals

KEYS = key_types(frozenset)
GLOBALS = plain_globals(KEYS)


def resolve(module: str, name: str) -> object:
    if f"{module}.{name}" not in GLOBALS:
        raise UnsafeCheckpointError(f"{module}.{name}")
    return GLOBALS[f"{module}.{name}"]


def load(data: bytes) -> object:
    return load_inert(data, resolve, keys=KEYS)


keys = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=9) | st.binary(),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
values = st.recursive(
    keys | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=4)
        | st.frozensets(keys, max_size=4)
    ),
    max_leaves=12,
)


def typed(value: object) -> object:
    """``value`` with the type of every part, and sets without an order."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(typed(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), repr(value)


@given(values, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=150, deadline=None)
def test_agrees_with_pickle(value, protocol):
    data = pickle.dumps(value, protocol)
    for form in (data, pickletools.optimize(data)):
        assert typed(load(form)) == typed(value)


def test_long_values():
    value = [2**3000, -(2**3000), "é" * 300, b"x" * 300, [None] * 3000, {n: n for n in range(3000)}]
    for protocol in (2, 4, 5):
        assert load(pickle.dumps(value, protocol)) == value


def test_recursive_lists():
    value: list[object] = [1]
    value.append(value)
    found = load(pickle.dumps(value))
    assert found[0] == 1 and found[1] is found


def deep_key(tuples: bytes) -> bytes:
    return b"\x80\x04})" + tuples + b"Ns."


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", FormatError, "slot 2147483647"),
        (deep_key(b"\x85" * 100_000), UnsafeCheckpointError, "nested tuple"),
        (deep_key(b"2\x86" * 100), UnsafeCheckpointError, "nested tuple"),
        (deep_key(b"(" + b"N" * 1000 + b"t\x85"), UnsafeCheckpointError, "nested tuple"),
        (b"\x80\x04}\x8b" + struct.pack("<I", 9999) + b"\1" * 9999 + b"Ns.",
         UnsafeCheckpointError, "long integer"),
        (b"\x80\x04}]Ns.", FormatError, "list as a key"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b".", FormatError, "asks for bytes"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".", FormatError, "asks for bytes"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 60) + b".", FormatError, "asks for bytes"),
        (b"\x80\x04B\xff\xff\xff\xff.", FormatError, "asks for bytes"),
        (b"\x80\x04X\xff\xff\xff\xff.", FormatError, "asks for bytes"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", FormatError, "asks for bytes"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N", FormatError, "malformed"),
        (b"cos\nsystem\n(S'true'\ntR.", UnsafeCheckpointError, "os.system"),
        (b"(S'true'\nios\nsystem\n.", UnsafeCheckpointError, "STRING"),
        (b"\x80\x02(ios\nsystem\n.", UnsafeCheckpointError, "INST"),
        (b"\x80\x02\x82\x01.", UnsafeCheckpointError, "EXT1"),
        (b"\x80\x02NQ.", UnsafeCheckpointError, "outside"),
        (b"\x80\x02N)R.", UnsafeCheckpointError, "calls a NoneType"),
        (b"\x80\x02]N\x62.", UnsafeCheckpointError, "state of a list"),
        (b"\x80\x02c__builtin__\nset\n}b.", UnsafeCheckpointError, "state of a Factory"),
        (b"\x80\x04(\x8c\x02os\x8c\x06system\x93.", UnsafeCheckpointError, "os.system"),
        (b"\x80\x09N.", FormatError, "protocol 9"),
        (b"\xff", FormatError, "no opcode"),
        (b"", FormatError, "IndexError"),
        (b"\x80\x02\x86.", FormatError, "IndexError"),
        (b"\x80\x02h\x05.", FormatError, "IndexError"),
        (b"\x80\x02NN.", FormatError, "middle"),
        (b"\x80\x02(N.", FormatError, "middle"),
    ],
)  # fmt: skip
def test_hostile_pickles(data, error, said):
    with pytest.raises(error, match=said):
        load(data)


@given(values, st.data())
@settings(max_examples=300, deadline=None)
def test_changed_bytes_never_escape(value, data):
    pickled = bytearray(pickle.dumps(value, data.draw(st.sampled_from([2, 4]))))
    for _ in range(data.draw(st.integers(1, 4))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    try:
        load(bytes(pickled))
    except CheckpointError:
        pass


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_short_cut_for_counts_agrees_with_the_long_way(protocol):
    class Counts(tuple):
        def __reduce__(self):
            return Counts, (tuple(self),)

    Counts.__qualname__ = "Counts"
    globals()["Counts"] = Counts
    shapes = [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (300, 70000), (2**31,), (2**40, 5), (1, 2)]
    data = pickle.dumps([Counts(shape) for shape in shapes * 50], protocol)
    for of_counts in (False, True):
        calls: list[tuple[object, ...]] = []

        def make(args, calls=calls):
            calls.append(args)
            return list(args[0])

        factory = Factory("Counts", make, of_counts)
        found = load_inert(data, lambda module, name, factory=factory: factory)
        assert found == [list(shape) for shape in shapes * 50]
    assert len(calls) < 250
    # A factory that is fetched and then called in another way is the factory itself.
    odd = b"\x80\x02cm\nC\nq\x000h\x00K\x01K\x02\x86\x86."
    assert load_inert(odd, lambda module, name: factory) == (factory, (1, 2))
