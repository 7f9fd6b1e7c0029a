"""MEGA's header and footer: what is read, what is refused, and what is written."""

import random
import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import zstandard

from dcp_pipeline.core.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    NewerFormatError,
    UnsafeCheckpointError,
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
from tests.mega_files import FLOATS, SAMPLES, chunk, entry, footer, mega


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


# What is refused

NESTED = struct.pack("<IIQ", 12, 12, 1)
PIECES = [chunk(0, 0, 0, 12, 0, 12), chunk(0, 1, 12, 12, 12, 12)]
CHUNKED = [entry("a", storage="chunked_raw_dense")]

REFUSED: dict[str, tuple[bytes, type[CheckpointError], str]] = {
    "nothing": (b"", FormatError, "no MEGA file"),
    "magic": (mega(magic=b"MEGB"), FormatError, "no MEGA file"),
    "newer": (mega(version=2), NewerFormatError, "version 2"),
    "version zero": (mega(version=0), FormatError, "version 0"),
    "tensors": (mega(tensor_count=1 << 60), FormatError, "claims 1152921504606846976 tensors"),
    "pairs": (mega(pair_count=1 << 60), FormatError, "claims 1152921504606846976 key/values"),
    "one tensor more": (mega([entry("a")], FLOATS, tensor_count=3), FormatError, ""),
    "self-description": (
        mega([entry("a")], FLOATS, {"mega.tensor_info.format": "x"}),
        FormatError,
        "expected 'self_describing'",
    ),
    "alignment zero": (mega(pairs={"general.alignment": 0}), FormatError, "alignment"),
    "alignment text": (mega(pairs={"general.alignment": "32"}), FormatError, "alignment"),
    "alignment huge": (mega(pairs={"general.alignment": 1 << 62}), FormatError, "alignment"),
    "array of arrays": (mega(pairs={"k": NESTED}), FormatError, "array of arrays"),
    "array count": (
        mega(pairs={"k": struct.pack("<IIQ", 12, 0, 1 << 61)}),
        FormatError,
        "elements of an array",
    ),
    "array of texts": (
        mega(pairs={"k": struct.pack("<IIQ", 12, 11, 1 << 40)}),
        FormatError,
        "elements of an array",
    ),
    "type": (mega(pairs={"k": struct.pack("<I", 13)}), FormatError, "unknown type 13"),
    "bool": (mega(pairs={"k": struct.pack("<IB", 10, 2)}), FormatError, "bool of 2"),
    "no UTF-8": (
        mega(pairs={"k": struct.pack("<IQ", 11, 1) + b"\xff"}),
        FormatError,
        "no UTF-8",
    ),
    "text length": (mega(pairs={"k": struct.pack("<IQ", 11, 1 << 62)}), FormatError, "truncated"),
    "fields": (mega([entry("a", fields=64)], FLOATS), FormatError, "fields that are not known"),
    "dimensions": (
        mega([entry("a", ndim=1 << 31)], FLOATS),
        UnsafeCheckpointError,
        "2147483648 dimensions",
    ),
    "shape": (mega([entry("a", (1 << 40, 1 << 40))], FLOATS), UnsafeCheckpointError, "absurd"),
    "shape with a zero": (
        mega([entry("a", (0, 1 << 63, 1 << 63))], FLOATS),
        UnsafeCheckpointError,
        "absurd",
    ),
    "dtype": (mega([entry("a", dtype="C64")], FLOATS), FormatError, "unknown dtype 'C64'"),
    "odd F4": (mega([entry("a", (3,), "F4")], FLOATS), FormatError, "two elements"),
    "storage": (mega([entry("a", storage="sparse")], FLOATS), FormatError, "sparse"),
    "flags": (mega([entry("a", flags=4)], FLOATS), FormatError, "flags that are not known"),
    "codec": (mega([entry("a", flags=1, codec=2, stored=24)], FLOATS), FormatError, "codec 2"),
    "codec without flag": (mega([entry("a", codec=1)], FLOATS), FormatError, "flags 0x0"),
    "flag without codec": (mega([entry("a", flags=1, stored=9)], FLOATS), FormatError, "codec 0"),
    "compressed to what": (mega([entry("a", flags=1, codec=1)], FLOATS), FormatError, "not said"),
    "bomb": (
        mega([entry("a", (1 << 40,), flags=1, codec=1, stored=24)], FLOATS),
        UnsafeCheckpointError,
        "24 compressed bytes of 'a' claim",
    ),
    "raw of another size": (mega([entry("a", stored=20)], FLOATS), FormatError, "stored in 20"),
    "shuffled by nothing": (
        mega([entry("a", flags=2, shuffle=0)], FLOATS),
        FormatError,
        "elements of no bytes",
    ),
    "shuffled by seven": (
        mega([entry("a", flags=2, shuffle=7)], FLOATS),
        FormatError,
        "elements of 7",
    ),
    "checksum type": (
        mega([entry("a", checksum=(3, b""))], FLOATS),
        FormatError,
        "checksum 3",
    ),
    "checksum too long": (
        mega([entry("a", checksum=(1, bytes(31) + b"x"))], FLOATS),
        FormatError,
        "longer than 4 bytes",
    ),
    "checksum of nothing": (
        mega([entry("a", checksum=(0, b"x"))], FLOATS),
        FormatError,
        "longer than 0 bytes",
    ),
    "cut off": (mega([entry("a")], FLOATS[:-1]), FormatError, "24 bytes at 0 of a payload of 23"),
    "outside": (mega([entry("a", offset=1 << 61)], FLOATS), FormatError, "of a payload of 24"),
    "far outside": (mega([entry("a", offset=1 << 63)], FLOATS), UnsafeCheckpointError, "absurd"),
    "overlap": (
        mega([entry("a"), entry("b", offset=20)], FLOATS * 2),
        FormatError,
        "'a' and 'b' overlap",
    ),
    "tensor twice": (
        mega([entry("a"), entry("a", offset=24)], FLOATS * 2),
        FormatError,
        "a tensor twice",
    ),
    "chunk rows": (
        mega(CHUNKED, FLOATS, {"mega.chunk_directory.count": 1 << 40}, PIECES),
        FormatError,
        "rows of mega.chunk_directory",
    ),
    "chunk count below zero": (
        mega(CHUNKED, FLOATS, {"mega.chunk_directory.count": -1}, PIECES),
        FormatError,
        "count -1",
    ),
    "chunk format": (
        mega(CHUNKED, FLOATS, {"mega.chunk_directory.format": "v2"}, PIECES),
        FormatError,
        "expected v1",
    ),
    "segment rows": (
        mega(pairs={"mega.segment_directory.count": 9, "mega.segment_directory.format": "v1"}),
        FormatError,
        "rows of mega.segment_directory",
    ),
    "no chunks": (mega(CHUNKED, FLOATS), FormatError, "hold 0 of its 24 bytes"),
    "chunks missing": (mega(CHUNKED, FLOATS, None, PIECES[:1]), FormatError, "hold 12 of its 24"),
    "chunks with a gap": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 1, 16, 8, 12, 8)]),
        FormatError,
        "gap or overlap at its byte 12",
    ),
    "chunk twice": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 0, 12, 12, 12, 12)]),
        FormatError,
        "a chunk twice",
    ),
    "chunks overlap in the file": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 1, 12, 12, 8, 12)]),
        FormatError,
        "overlap",
    ),
    "chunk of nobody": (
        mega(CHUNKED, FLOATS, None, [*PIECES, chunk(7, 0, 0, 12, 0, 12)]),
        FormatError,
        "a tensor that is not there",
    ),
    "chunk of a whole tensor": (
        mega([entry("a")], FLOATS, None, PIECES),
        FormatError,
        "stored whole and has chunks",
    ),
    "chunk of nothing": (
        mega(CHUNKED, FLOATS, None, [*PIECES, chunk(0, 2, 24, 0, 24, 0)]),
        FormatError,
        "empty",
    ),
    "chunk outside": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 1, 12, 12, 1 << 40, 12)]),
        FormatError,
        "of a payload of 24",
    ),
    "chunk absurd": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 1, 12, (1 << 64) - 1, 0, 12)]),
        FormatError,
        "absurdly",
    ),
    "chunk reserved": (
        mega(CHUNKED, FLOATS, None, [PIECES[0], chunk(0, 1, 12, 12, 12, 12, zero=1)]),
        FormatError,
        "",
    ),
    "chunked and compressed": (
        mega([entry("a", storage="chunked_raw_dense", flags=1, codec=1, stored=9)], FLOATS, None,
             PIECES),
        FormatError,
        "says how it is stored as a whole",
    ),
    "footer generation": (footer(mega(), {}, 0), FormatError, "does not fit"),
    "footer place": (footer(mega(), {}, offset=8), FormatError, "does not fit"),
    "footer size": (footer(mega(), {}, size=1 << 62), FormatError, "does not fit"),
    "footer base": (footer(mega(), {}, base_size=1 << 62), FormatError, "does not fit"),
    "footer digest": (footer(mega(), {}, digest=bytes(32)), FormatError, "SHA-256"),
    "footer over the payload": (
        footer(mega([entry("a")], FLOATS), {}, base_size=8),
        FormatError,
        "",
    ),
    "footer of structure": (
        footer(mega([entry("a")], FLOATS), {"general.alignment": 64}),
        FormatError,
        "replaces general.alignment",
    ),
    "footer of chunks": (
        footer(mega([entry("a")], FLOATS), {"mega.chunk_directory.count": 1}),
        FormatError,
        "replaces mega.chunk_directory.count",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_files_are_refused_quickly_and_by_name(case: str) -> None:
    data, kind, text = REFUSED[case]
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(kind) as caught:
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5
    assert text in str(caught.value)


def test_a_key_twice_is_refused() -> None:
    data = mega(pairs={"k": 1, "l": 2})
    with pytest.raises(FormatError, match="the key 'k' twice"):
        parse(data.replace(forge.text("l"), forge.text("k")))


@pytest.mark.parametrize("sample", ["two_crc32_sha256", "chunked_crc32", "overlay"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_changed_files_are_refused_by_name_or_read(sample: str, seed: int) -> None:
    """No other error comes out, nothing is read outside the file, and little memory is taken."""
    good = (SAMPLES / f"{sample}.mega").read_bytes()
    chance = random.Random(f"{sample} {seed}")
    tracemalloc.start()
    try:
        for _ in range(250 if seed == 0 else 5_000):
            data = bytearray(good)
            for _ in range(chance.randint(1, 3)):
                at = chance.randrange(min(len(data), 700))
                if chance.random() < 0.3:
                    data[at : at + 8] = struct.pack(
                        "<Q", chance.choice([0, 1, 1 << 62, (1 << 64) - 1])
                    )
                elif chance.random() < 0.2:
                    del data[at : at + chance.randint(1, 40)]
                else:
                    data[at] ^= 1 << chance.randrange(8)
            try:
                names = [tensor.name for tensor in parse(bytes(data)).tensors]
                for name in names:
                    elements(bytes(data), name)
            except CheckpointError:
                pass
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


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
