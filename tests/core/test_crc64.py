"""CRC-64/NVME against an implementation that goes bit by bit."""

import random
import subprocess
import sys

import numpy as np
import pytest

from dcp_pipeline.core.crc64 import finished, fold, raw_crc64, raw_crcs, raw_crcs_of_short, shift

POLYNOMIAL = 0xAD93D23594C93659
REFLECTED = int(f"{POLYNOMIAL:064b}"[::-1], 2)
ALL = (1 << 64) - 1


def bit_by_bit(data: bytes, state: int = 0) -> int:
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (REFLECTED if state & 1 else 0)
    return state


def by_the_book(data: bytes) -> int:
    return bit_by_bit(data, ALL) ^ ALL


def test_known_values() -> None:
    vectors = {
        b"": 0x0000000000000000,
        b"123456789": 0xAE8B14860A799888,
        bytes(4096): 0x6482D367EB22B64E,
        b"\xff" * 4096: 0xC0DDBA7302ECA3AC,
    }
    for data, wanted in vectors.items():
        assert finished(raw_crc64(data), len(data)) == wanted == by_the_book(data)


def test_the_raw_crc_is_what_goes_bit_by_bit() -> None:
    generator = random.Random(0)
    for length in (0, 1, 7, 8, 9, 63, 64, 255, 1000):
        data = generator.randbytes(length)
        start = generator.getrandbits(64)
        assert raw_crc64(data) == bit_by_bit(data)
        assert raw_crc64(memoryview(data), start) == bit_by_bit(data, start)
        assert finished(raw_crc64(data), length) == by_the_book(data)


def test_zeros_in_front_change_nothing() -> None:
    assert raw_crc64(bytes(1000)) == 0
    assert raw_crc64(bytes(77) + b"abc") == raw_crc64(b"abc")


@pytest.mark.parametrize("count", [0, 1, 8, 9, 500])
def test_a_shift_is_zeros_behind(count: int) -> None:
    generator = np.random.default_rng(count)
    values = generator.integers(0, ALL, count, np.uint64, endpoint=True)
    nbytes = generator.integers(0, 70, count) * generator.integers(0, 2, count)
    wanted = [
        bit_by_bit(bytes(n), v) for v, n in zip(values.tolist(), nbytes.tolist(), strict=True)
    ]
    assert shift(values, nbytes).tolist() == wanted


def test_a_shift_by_a_great_many_bytes() -> None:
    value, step = raw_crc64(b"x"), 1 << 20
    zeros, far = bytes(step), np.asarray([3 * step + 5] * 20)
    wanted = raw_crc64(zeros[:5], raw_crc64(zeros, raw_crc64(zeros, raw_crc64(zeros, value))))
    assert set(shift(np.full(20, value, np.uint64), far).tolist()) == {wanted}
    assert shift(np.full(1, value, np.uint64), far[:1]).tolist() == [wanted]
    # There and on, as far as any tensor reaches.
    for count in (1, 20):
        one = shift(np.full(count, value, np.uint64), np.full(count, (1 << 61) + 3))
        two = shift(
            shift(np.full(count, value, np.uint64), np.full(count, 1 << 61)), np.full(count, 3)
        )
        assert one.tolist() == two.tolist()


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 8, 33])
def test_folding_equal_pieces(pieces: int) -> None:
    data = random.Random(pieces).randbytes(3 * pieces * 5)
    texts = [data[at : at + pieces * 5] for at in range(0, len(data), pieces * 5)]
    values = [[raw_crc64(text[at : at + 5]) for at in range(0, len(text), 5)] for text in texts]
    found = fold(np.asarray(values, np.uint64), 5)
    assert found.tolist() == [bit_by_bit(text) for text in texts]


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 7, 8, 9, 16, 31])
def test_many_texts_at_a_time(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(40 * nbytes)
    wanted = [bit_by_bit(data[at : at + nbytes]) for at in range(0, len(data), nbytes)]
    assert raw_crcs(memoryview(data), nbytes).tolist() == wanted
    assert raw_crcs_of_short(memoryview(data), nbytes).tolist() == wanted


def test_who_only_looks_does_not_import_the_library() -> None:
    program = (
        "import sys, dcp_pipeline.tools.inspect, dcp_pipeline.cli.main\n"
        "assert not [name for name in sys.modules if 'awscrt' in name]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
