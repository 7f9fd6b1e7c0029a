"""MEGA files that are refused: hostile ones, and changed ones."""

import random
import struct
import time
import tracemalloc

import pytest

from dcp_pipeline.core.errors import (
    CheckpointError,
    FormatError,
    NewerFormatError,
    UnsafeCheckpointError,
)
from tests import mega_files as forge
from tests.formats.test_mega import elements, parse
from tests.mega_files import FLOATS, SAMPLES, chunk, entry, footer, mega

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
