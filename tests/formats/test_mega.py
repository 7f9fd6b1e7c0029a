"""MEGA's header and footer: what is read, what is refused, and what is written."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard

from dcp_pipeline.core.errors import (
    ChecksumError,
    FormatError,
    UnsupportedLeafError,
)
from dcp_pipeline.core.spans import Span, check_spans, decode_spans, encode_spans
from dcp_pipeline.formats.mega import MegaFile, parse_mega
from dcp_pipeline.formats.mega_encode import MegaEntry, encode_mega
from dcp_pipeline.formats.mega_values import decode_value, encode_value
from dcp_pipeline.formats.spans import (
    check_stored,
    checksum_of,
    compress,
    decode_span,
    shuffled,
    unshuffled,
)
from tests import mega_files as forge
from tests.mega_files import FLOATS, SAMPLES, entry, footer, mega


def parse(data: bytes) -> MegaFile:
    def read(offset: int, nbytes: int) -> bytes:
        assert 0 <= offset and offset + nbytes <= len(data), "a read outside the file"
        return data[offset : offset + nbytes]

    return parse_mega(read, len(data))


def values(file: MegaFile) -> dict[str, Any]:
    return {key: pair.value for key, pair in file.metadata.items()}


def elements(data: bytes, name: str) -> bytes:
    (tensor,) = [tensor for tensor in parse(data).tensors if tensor.name == name]
    result = b""
    for span in tensor.spans:
        stored = memoryview(data)[span.offset : span.offset + span.stored]
        check_stored(span, stored, name)
        result += bytes(decode_span(span, stored, name))
    return result


# What others have written


def test_samples_are_read_as_their_makers_say() -> None:
    file = parse((SAMPLES / "two_crc32_sha256.mega").read_bytes())
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in file.tensors] == [
        ("w.a", "float32", (2, 3), 24),
        ("w.b", "int64", (4,), 32),
    ]
    assert [t.spans[0].checksum for t in file.tensors] == ["crc32", "sha256"]
    assert (file.data_start, file.data_end) == (4096, 4152)
    assert values(file) == {
        "general.architecture": "demo",
        "general.alignment": 4096,
        "mega.tensor_info.format": "self_describing",
        "n.u64": 1 << 40,
        "flag": True,
        "strs": ["x", "y"],
        "ints": [1, 2],
    }
    assert not file.is_signed


@pytest.mark.parametrize(
    ("sample", "name", "expected"),
    [
        ("minimal", "a", np.arange(6, dtype="<f4")),
        ("two_crc32_sha256", "w.b", np.arange(4, dtype="<i8")),
        ("shuffled_sha256", "x", np.arange(8, dtype="<f4")),
        ("chunked_crc32", "x", np.arange(8, dtype="<f4")),
        ("scalar_empty", "e", np.zeros(0)),
        ("converted_zstd/model-00001-of-00002", "zeros", np.zeros(64 * 64, "<f4")),
        ("converted_none/model-00001-of-00002", "zeros", np.zeros(64 * 64, "<f4")),
        ("converted_zstd/model-00002-of-00002", "ar", np.arange(1024, dtype="<f4")),
    ],
)
def test_elements_of_samples(sample: str, name: str, expected: Any) -> None:
    assert elements((SAMPLES / f"{sample}.mega").read_bytes(), name) == expected.tobytes()


def test_a_wrong_checksum_names_what_is_read() -> None:
    data = (SAMPLES / "two_corrupt_payload.mega").read_bytes()
    with pytest.raises(ChecksumError, match=r"w\.a is damaged: bytes 4096 to 4120 have the crc32"):
        elements(data, "w.a")
    assert elements(data, "w.b") == np.arange(4, dtype="<i8").tobytes()


def test_the_last_footer_alone_counts() -> None:
    file = parse((SAMPLES / "overlay.mega").read_bytes())
    assert values(file)["k2"] == "v2" and "k1" not in file.metadata
    assert (file.data_start, file.data_end) == (224, 248)


def test_a_signature_is_seen_and_not_believed() -> None:
    signed = footer(mega([entry("a")], FLOATS), {"mega.trust.signature.value": "eA=="})
    assert parse(signed).is_signed


def test_values_say_where_they_lie() -> None:
    data = footer(mega([entry("a")], FLOATS, {"k": "old", "n": -3}), {"k": "new"})
    file = parse(data)
    for key, expected in [("k", "new"), ("n", -3)]:
        place = file.metadata[key]
        assert decode_value(data[place.offset : place.offset + place.nbytes]) == expected


def test_gaps_any_order_and_bytes_behind_are_accepted() -> None:
    data = mega([entry("late", (2,), offset=40), entry("early", (2,), offset=8)], bytes(64) + b"!")
    assert [t.spans[0].offset - parse(data).data_start for t in parse(data).tensors] == [40, 8]


def test_the_alignment_is_32_where_the_file_does_not_say() -> None:
    assert parse(mega([entry("a")], FLOATS, alignment=None)).data_start % 32 == 0


def test_hints_are_passed_over() -> None:
    pairs = {
        "mega.segment_directory.count": 2,
        "mega.segment_directory.format": "v1",
        "mega.moe.expert_table.count": 1,
        "mega.moe.expert_table.format": "v1",
    }
    data = mega([entry("a")], FLOATS, pairs, extra=b"\xff" * (2 * 72 + 32))
    (tensor,) = parse(data).tensors
    assert data[tensor.spans[0].offset :] == FLOATS


# Values


@pytest.mark.parametrize(
    "given",
    [True, False, 0, -1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.1, float("inf"), "", "é\0",
     [1, -2], [True], [0.5, -0.0], ["a", ""], [1, 1 << 63]],
)  # fmt: skip
def test_values_come_back_exactly(given: Any) -> None:
    encoded = encode_value(given)
    assert encoded is not None
    found = decode_value(encoded)
    assert found == given and repr(found) == repr(given)


@pytest.mark.parametrize(
    "given", [None, (1,), [], [1, 2.0], [True, 1], [[1]], {"a": 1}, b"x", 1 << 64, [-1, 1 << 63]]
)
def test_values_without_a_type_of_their_own_have_no_encoding(given: Any) -> None:
    assert encode_value(given) is None


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError):
        encode_value("\ud800")


def test_a_value_that_goes_on_is_refused() -> None:
    encoded = encode_value(1)
    assert encoded is not None
    with pytest.raises(FormatError, match="followed by 1 bytes"):
        decode_value(encoded + b"\0")


# Spans


def test_shuffle_and_back() -> None:
    assert bytes(shuffled(FLOATS, 4)) == forge.shuffle(FLOATS, 4)
    assert bytes(unshuffled(shuffled(FLOATS, 4), 4)) == FLOATS
    assert bytes(unshuffled(b"", 4)) == b""


@pytest.mark.parametrize(
    "stored",
    [
        compress(FLOATS * 9, 3),
        zstandard.ZstdCompressor(write_content_size=False).compress(FLOATS * 9),
        compress(FLOATS * 4, 3) + compress(FLOATS * 5, 3),
    ],
    ids=["one frame", "no size", "two frames"],
)
def test_frames_are_unpacked(stored: bytes) -> None:
    span = Span(0, len(stored), 0, 24 * 9, "zstd")
    assert bytes(decode_span(span, memoryview(stored), "a")) == FLOATS * 9


@pytest.mark.parametrize(
    "stored",
    [
        compress(FLOATS * 10, 3),
        compress(FLOATS * 8, 3),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24)),
        compress(FLOATS * 9, 3) + b"x",
        compress(FLOATS * 9, 3)[:-3],
        compress(FLOATS * 9, 3) + compress(FLOATS, 3),
        b"no frame at all",
        b"",
    ],
    ids=["more", "less", "bomb", "more behind", "cut", "frame behind", "junk", "nothing"],
)
def test_frames_of_another_size_are_refused(stored: bytes) -> None:
    span = Span(0, len(stored), 0, 24 * 9, "zstd")
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="the tensor a"):
            decode_span(span, memoryview(stored), "the tensor a")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


SPANS = {
    3: (Span(100, 10, 0, 10), Span(0, 7, 10, 90, "zstd", 2, "sha256", b"s" * 32)),
    5: (Span(110, 4, 0, 4, "raw", 0, "crc32", b"crc!"),),
    9: (),
}


def test_spans_travel() -> None:
    assert decode_spans(encode_spans(SPANS)) == SPANS
    assert decode_spans(encode_spans({})) == {}


def test_spans_are_checked() -> None:
    check_spans(SPANS[3], 100, 110, "w")
    with pytest.raises(FormatError, match="ends at 110, its file has 109 bytes"):
        check_spans(SPANS[3], 100, 109, "w")
    with pytest.raises(FormatError, match="hold 100 of its 101 bytes"):
        check_spans(SPANS[3], 101, 110, "w")
    with pytest.raises(FormatError, match="gap or overlap"):
        check_spans(SPANS[3][::-1], 100, 110, "w")
    with pytest.raises(FormatError, match="negative"):
        check_spans([Span(-1, 4, 0, 4)], 4, 110, "w")


# What is written


def test_what_is_written_is_read_back() -> None:
    data = FLOATS * 4
    pieces = [data[:40], data[40:80], data[80:]]
    packed = [compress(bytes(shuffled(piece, 4)), 3) for piece in pieces]
    spans, offset, begin = [], len(FLOATS), 0
    for piece, stored in zip(pieces, packed, strict=True):
        digest = checksum_of("sha256", stored)
        spans.append(Span(offset, len(stored), begin, len(piece), "zstd", 4, "sha256", digest))
        offset, begin = offset + len(stored), begin + len(piece)
    crc = checksum_of("crc32", FLOATS)
    tensors = [
        MegaEntry("plain", "float32", (2, 3), (Span(0, 24, 0, 24, checksum="crc32", digest=crc),)),
        MegaEntry("cut", "float32", (24,), tuple(spans)),
        MegaEntry("four", "float4_e2m1fn_x2", (2, 3), (Span(offset, 6, 0, 6),)),
    ]
    fact = encode_value("value")
    assert fact is not None
    header = encode_mega(tensors, {"fact": fact}, 64)
    begin, length = header.values["fact"]
    assert len(header.data) % 64 == 0 and header.data[begin : begin + length] == fact
    whole = header.data + FLOATS + b"".join(packed) + b"123456"
    file = parse(whole)
    assert [(t.name, t.dtype, t.shape) for t in file.tensors] == [
        ("plain", "float32", (2, 3)),
        ("cut", "float32", (24,)),
        ("four", "float4_e2m1fn_x2", (2, 3)),
    ]
    assert values(file)["fact"] == "value"
    assert elements(whole, "plain") == FLOATS
    assert elements(whole, "cut") == data
    assert elements(whole, "four") == b"123456"


def test_a_header_is_as_long_before_its_values_are_known() -> None:
    def header(span: Span, second: Span) -> bytes:
        return encode_mega([MegaEntry("a", "int8", (9,), (span, second))], {}, 32).data

    unknown = header(Span(0, 0, 0, 4, "zstd", 0, "crc32"), Span(0, 0, 4, 5, "zstd", 0, "crc32"))
    known = header(
        Span(7, 99, 0, 4, "zstd", 0, "crc32", b"1234"), Span(1 << 40, 8, 4, 5, "zstd", 0, "crc32")
    )
    assert len(known) == len(unknown)


@pytest.mark.parametrize("dtype", ["complex64", "complex32", "float8_e4m3fnuz"])
def test_dtypes_that_mega_lacks_are_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=f"torch.{dtype}, which MEGA cannot hold"):
        encode_mega([MegaEntry("a", dtype, (1,), (Span(0, 8, 0, 8),))], {}, 32)


def test_keys_of_the_format_are_not_for_others() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"general\.alignment"):
        encode_mega([], {"general.alignment": b""}, 32)
