"""What errors show of a value that a stranger has chosen."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from dcp_pipeline.core.shown import shown


class Evil:
    def __repr__(self) -> str:
        raise AssertionError("the repr of a stranger's object is not asked for")


def doubled(make: Any, levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = make(value)
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (-3, "-3"),
        (0.5, "0.5"),
        (1j, "1j"),
        ("a'b", '"a\'b"'),
        (b"\0", "b'\\x00'"),
        (bytearray(b"a"), "bytearray(b'a')"),
        ((), "()"),
        ((1,), "(1,)"),
        ([1, "a"], "[1, 'a']"),
        ({"a": (1, 2)}, "{'a': (1, 2)}"),
        (OrderedDict(a=1), "{'a': 1}"),
        (list(range(9)), "[0, 1, 2, 3, ...]"),
        (Evil(), "a Evil"),
        ([Evil()], "[a Evil]"),
        ([[[[5]]]], "[[[a list]]]"),
        pytest.param(1 << 20_000, "an int of 20001 bits", id="a huge int"),
    ],
)
def test_what_is_shown(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    "value",
    [
        doubled(lambda x: (x, x), 200),
        doubled(lambda x: [x, x], 200),
        doubled(lambda x: {"a": x, "b": x}, 200),
        doubled(lambda x: [x] * 1000, 200),
        "x" * 10_000_000,
        ["x" * 10_000_000] * 1000,
    ],
    ids=["tuples", "lists", "dicts", "long lists", "text", "texts"],
)
def test_the_rest_is_never_looked_at(value: object) -> None:
    assert len(shown(value)) <= 80 and len(shown(value, 40)) <= 40
