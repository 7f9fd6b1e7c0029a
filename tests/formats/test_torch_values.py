"""Values go through the guarded reader and back; what it would refuse is refused when written."""

import enum
import functools
import io
import os
import random
import zipfile
from collections import Counter, OrderedDict, namedtuple

import pytest
import torch

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.formats.torch_values import _is_plain
from dcp_pipeline.formats.torch_zip import check_readable, read_value, write_value

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


class Custom:
    def __init__(self, value=3):
        self.value = value


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


dtypes = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
)
PLAIN = [
    None, True, 0, -1, 2**31, -(2**63), 2**2039 - 1, 1 - 2**2039, 0.5, float("-inf"), -0.0, 1 + 2j,
    complex("nan"), "", "é\ud800\udc00", "x" * 70_000, b"", b"\0\xff" * 9, [], (), {}, set(),
    frozenset({1, "a"}), {1, 2.5, None}, [1, (2, [3])], {1: "a", "1": "b", (1, 2): None, b"": ()},
    OrderedDict(b=1, a=2), {"x": OrderedDict()}, torch.Size([1, 2]), torch.Size([]),
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"), *dtypes,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=map(str, range(len(PLAIN))))
def test_what_is_taken_for_plain_is_read_back(value):
    assert _is_plain(value)
    found = read_value(check_readable(value))
    assert type(found) is type(value) and repr(found) == repr(value)


@pytest.mark.parametrize(
    "value",
    [Counter(a=3), Counter(), bytearray(b"abc"), [bytearray()]],
)
def test_other_accepted_values_go_through_a_round_trip(value):
    assert not _is_plain(value)
    assert read_value(check_readable(value)) == value


def test_tensors_come_back_on_the_cpu():
    value = {"a": torch.arange(3), "b": [torch.ones(2, dtype=torch.bfloat16)]}
    found = read_value(memoryview(check_readable(value)))
    assert torch.equal(found["a"], value["a"]) and found["b"][0].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Point(1, 2), "Point"),
        (Colour.RED, "Colour"),
        ([{"a": Custom()}], "Custom"),
        (2**2039, "int"),
        (range(3), "range"),
        (lambda: None, "lambda"),
        (functools.partial(print), "partial"),
    ],
)
def test_what_would_be_refused_is_refused_when_written(value, named):
    with pytest.raises(UnsupportedLeafError, match=named):
        check_readable(value)


def test_deep_and_recursive_values():
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(UnsupportedLeafError, match="list"):
        check_readable(value)
    loop: list[object] = [1]
    loop.append(loop)
    found = read_value(check_readable(loop))
    assert found[1] is found


def test_safe_globals_and_trusted_lift_the_guard():
    data = write_value({"a": Custom(7)})
    with pytest.raises(UnsafeCheckpointError, match=r"Custom.*safe_globals.*trusted: true"):
        read_value(data)
    assert read_value(data, safe_globals=[Custom])["a"].value == 7
    assert read_value(data, trusted=True)["a"].value == 7
    assert check_readable({"a": Custom(7)}, [Custom]) == data
    with pytest.raises(UnsafeCheckpointError, match="Custom"):
        read_value(data)


def test_what_the_program_allowed_stays_allowed():
    data = write_value([Custom(1), Point(1, 2)])
    with torch.serialization.safe_globals([Custom]):
        before = set(torch.serialization.get_safe_globals())
        assert read_value(data, safe_globals=[Custom, Point])[1] == Point(1, 2)
        assert set(torch.serialization.get_safe_globals()) == before


def test_no_code_runs(tmp_path):
    target = tmp_path / "made"
    for evil, named in (
        (Evil(os.mkdir, str(target)), "mkdir"),
        (Evil(os.system, f"touch {target}"), "system"),
        (Evil(eval, f"open({str(target)!r}, 'w')"), "eval"),
    ):
        with pytest.raises(UnsafeCheckpointError, match=named):
            read_value(write_value([1, evil]))
        with pytest.raises(UnsafeCheckpointError, match=named):
            read_value(write_value({"a": evil}), safe_globals=[Custom])
    assert not target.exists()


def rezipped(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"", FormatError, "too few"),
        (b"garbage" * 20, FormatError, "end record"),
        (rezipped(b"\x80\x02N", zipfile.ZIP_DEFLATED), FormatError, "compressed"),
        (rezipped(b"\x80\x02"), FormatError, "malformed pickle"),
        (rezipped(b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."), UnsafeCheckpointError, "nested"),
        (rezipped(b"\x80\x02}" + b"(" * 5000 + b"t" * 5000 + b"Ns."),
         UnsafeCheckpointError, "nested"),
    ],
)  # fmt: skip
def test_malformed_items(data, error, said):
    with pytest.raises(error, match=said):
        read_value(data)


def test_many_tuples_are_no_danger():
    value = {(n, (n,)): (n, str(n)) for n in range(5000)}
    assert read_value(check_readable(value)) == value


def test_a_changed_byte_gives_a_value_or_a_named_error():
    rng = random.Random(3)
    item = write_value({"lr": 0.1, "betas": (0.9, 0.99), "state": [torch.arange(4), b"abc"]})
    for _ in range(1500):
        changed = bytearray(item)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(item))] = rng.randrange(256)
        try:
            read_value(bytes(changed))
        except CheckpointError:
            pass
