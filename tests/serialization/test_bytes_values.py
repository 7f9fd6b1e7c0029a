"""Values that are nothing but bytes take a way of their own; the format is the same."""

import gc
import io
import tracemalloc
from typing import Any

import pytest

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.formats import typed_json
from dcp_pipeline.serialization.safetensors import SafetensorsSerialization

SIZES = [0, 1, 2, 3, 4, 1000, (3 << 20) - 1, 3 << 20, (3 << 20) + 1, 7_000_000]


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", SIZES)
def test_the_text_is_the_same(kind: Any, size: int) -> None:
    value = kind(bytes(range(256)) * (size // 256) + bytes(range(size % 256)))
    data = SafetensorsSerialization().encode_value(value)
    assert data == typed_json.encode(value)
    for decode in (SafetensorsSerialization().decode_value, typed_json.decode):
        found = decode(data)
        assert type(found) is kind and found == value


@pytest.mark.parametrize(
    "text", ["AA", "A", "AA=", "====", "A A=", "AAAA\\u0041", 'AAAA","x":"AAAA', "é", "AAAA\n", "="]
)
def test_what_is_odd_is_what_it_was(text: str) -> None:
    data = f'{{"$bytes":"{text}"}}'.encode()
    ends: list[Any] = []
    for decode in (SafetensorsSerialization().decode_value, typed_json.decode):
        try:
            ends.append(decode(data))
        except FormatError as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


def test_memory() -> None:
    value, size = b"x" * (24 << 20), 24 << 20
    assert _peak(lambda: SafetensorsSerialization().encode_comparable(value)) < 2.2 * size
    data = SafetensorsSerialization().encode_value(value)
    assert _peak(lambda: SafetensorsSerialization().decode_value(data)) < 1.2 * size


def _peak(action: Any) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_stream_is_what_its_bytes_are() -> None:
    data = SafetensorsSerialization().encode_value(io.BytesIO(b"abc").getvalue())
    assert data == typed_json.encode(b"abc")
