import random
from pathlib import Path

import pytest

from dcp_pipeline.core.checksum import block_digests
from dcp_pipeline.core.errors import ChecksumError, CorruptCheckpointError
from dcp_pipeline.core.sums import BlockSums
from dcp_pipeline.storage.base import Source
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.storage.reading import Read, read_ranges

BLOCK = 4096


def sums_of(data: bytes, algorithm: str = "xxh3_64", block: int = BLOCK) -> BlockSums:
    return BlockSums(
        "f", len(data), algorithm, block, block_digests(algorithm, memoryview(data), block)
    )


def source_of(path: Path, data: bytes) -> Source:
    (path / "f").write_bytes(data)
    return FileSystemStorage().open(str(path)).open("f")


def read_all(source: Source, sums: BlockSums | None, ranges: list[tuple[int, int]]) -> list[bytes]:
    """Every other range is read in place, the others are delivered."""
    found: list[bytearray] = [bytearray(length) for _, length in ranges]
    reads = []
    for number, (offset, length) in enumerate(ranges):
        key = f"key{number}"
        if number % 2:
            reads.append(Read(offset, length, key, target=memoryview(found[number])))
        else:

            def deliver(data: memoryview, number: int = number) -> None:
                found[number][:] = data

            reads.append(Read(offset, length, key, deliver=deliver))
    read_ranges(source, sums, reads)
    return [bytes(part) for part in found]


@pytest.mark.parametrize("seed", range(12))
def test_any_ranges_are_read_exactly(tmp_path: Path, seed: int) -> None:
    """Small and large, at and across the ends of blocks, overlapping, to the end of the file."""
    generator = random.Random(seed)
    data = generator.randbytes(generator.choice([1, 100, BLOCK, BLOCK + 1, 40 * BLOCK + 17]))
    ranges = []
    for _ in range(30):
        offset = generator.randrange(len(data))
        if generator.random() < 0.5:
            offset = min(offset // BLOCK * BLOCK, len(data) - 1)
        longest = len(data) - offset
        length = generator.choice([1, longest, generator.randint(1, longest), min(longest, BLOCK)])
        ranges.append((offset, length))
    wanted = [data[offset : offset + length] for offset, length in ranges]
    with source_of(tmp_path, data) as source:
        for sums in (None, sums_of(data)):
            assert read_all(source, sums, ranges) == wanted


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("algorithm", ["xxh3_64", "crc32", "sha256"])
def test_every_flip_of_every_byte_is_found(tmp_path: Path, algorithm: str, is_direct: bool) -> None:
    """A whole read in place goes straight to its target; a delivered one through the buffer."""
    block = 64
    data = random.Random(0).randbytes(block * 9 + 5)
    sums = sums_of(data, algorithm, block)
    ranges = [(0, 1), (0, len(data))] if is_direct else [(0, len(data))]
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with source_of(tmp_path, damaged) as source, pytest.raises(ChecksumError) as caught:
            read_all(source, sums, ranges)
        assert f"block {at // block} " in str(caught.value) and "key" in str(caught.value)


def test_damage_outside_of_what_is_read_does_no_harm(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(20 * BLOCK)
    damaged = bytearray(data)
    damaged[10 * BLOCK + 5] ^= 1
    with source_of(tmp_path, bytes(damaged)) as source:
        sums = sums_of(data)
        assert read_all(source, sums, [(0, 9 * BLOCK), (11 * BLOCK, 9 * BLOCK)])
        # A block is the smallest thing that is verified.
        with pytest.raises(ChecksumError, match=r"block 10 .*key1"):
            read_all(source, sums, [(0, 10), (10 * BLOCK + 100, 3)])


@pytest.mark.parametrize("change", [-1, 1, -BLOCK, 5 * BLOCK])
def test_a_file_of_another_length(tmp_path: Path, change: int) -> None:
    data = random.Random(0).randbytes(8 * BLOCK)
    other = data[:change] if change < 0 else data + bytes(change)
    word = "cut off" if change < 0 else "appended to"
    with source_of(tmp_path, other) as source, pytest.raises(CorruptCheckpointError, match=word):
        read_all(source, sums_of(data), [(0, 10)])


@pytest.mark.parametrize("range_", [(0, 101), (90, 20), (100, 1), (5000, 1)])
def test_a_range_behind_the_end_without_digests(tmp_path: Path, range_: tuple[int, int]) -> None:
    with source_of(tmp_path, bytes(100)) as source, pytest.raises(CorruptCheckpointError):
        read_all(source, None, [range_])


def test_little_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    data = bytes(100 * BLOCK)
    with source_of(tmp_path, data) as source:

        def read(*ranges: tuple[int, int]) -> int:
            reads = [Read(o, n, "k", target=memoryview(bytearray(n))) for o, n in ranges]
            return read_ranges(source, sums_of(data), reads)

        assert read((0, len(data))) == len(data)
        assert read((10, 1)) == BLOCK
        assert read((10, 1), (20, 1), (BLOCK - 1, 2)) == 2 * BLOCK
        assert read((10, 50 * BLOCK)) == 51 * BLOCK


def test_a_check_between_two_steps_stops_the_read(tmp_path: Path) -> None:
    with source_of(tmp_path, bytes(10)) as source:

        def stop() -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            read_ranges(source, None, [Read(0, 1, "k", deliver=lambda data: None)], stop)
