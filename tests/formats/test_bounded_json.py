import json
from typing import Any

import pytest

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError
from dcp_pipeline.formats.bounded_json import parse_object


def parsed(data: bytes, most_bytes: int = 1000, most_values: int = 20) -> dict[str, Any]:
    return parse_object(data, "it", most_bytes=most_bytes, most_values=most_values)


@pytest.mark.parametrize(
    "value", [{}, {"a": 1}, {"a": [1.5, None, {"b": "ü"}], "": {}, "\\u": '"'}, {"😀": True}]
)
def test_what_json_reads(value: dict[str, Any]) -> None:
    for ascii_only in (True, False):
        assert parsed(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not JSON"),
        (b"[]", "holds a list, expected an object"),
        (b"null", "holds a NoneType"),
        (b'{"a": 1, "b": {"c": 1, "c": 1}}', "'c' stands twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "-Infinity is no number"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"a":' * 15 + b"1" + b"}" * 14, "is not JSON"),
    ],
)
def test_what_is_damaged(data: bytes, said: str) -> None:
    with pytest.raises(FormatError, match=f"it .*{said}|it {said}"):
        parsed(data, most_bytes=10_000)


def test_nesting() -> None:
    data = b'{"a":' * 5000 + b"1" + b"}" * 5000
    with pytest.raises(FormatError, match="is not JSON"):
        parsed(data, most_bytes=len(data), most_values=5000)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1}' + b" " * 993,
        '{"ü": 1}'.encode() + b" " * 242,
        b'{"a": [' + b"1," * 20 + b"1]}",
        b'{"a": [' + b"[" * 20,
    ],
)
def test_what_is_too_much(data: bytes) -> None:
    with pytest.raises(UnsafeCheckpointError, match="are read"):
        parsed(data)
    assert len(data) > 20


def test_the_largest_that_is_read() -> None:
    assert parsed(b'{"a": 1}' + b" " * 992) == {"a": 1}
    assert parsed('{"ü": 1}'.encode() + b" " * 241) == {"ü": 1}
    assert parsed(b'{"a": [' + b"1," * 18 + b"1]}") == {"a": [1] * 19}
