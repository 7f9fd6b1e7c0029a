"""Files of torch.save that are made as a stream: torch opens them, whatever their size."""

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.formats.torch_archive import ArchivedTensor, TorchArchive
from dcp_pipeline.formats.torch_values import loads_weights_only
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.memory import bytes_of
from tests.equal import assert_same

SHAPES: list[tuple[int, ...]] = [(), (5,), (3, 4), (0, 3), (2, 0), (1, 2, 3, 4)]


def archived(tensors: dict[str, torch.Tensor], **values: object) -> bytes:
    numbers = {name: number for number, name in enumerate(tensors)}
    state = {
        name: ArchivedTensor(tensor.dtype, tuple(tensor.shape), numbers[name])
        for name, tensor in tensors.items()
    }
    held = list(tensors.values())
    made = TorchArchive({**state, **values})
    data = b"".join(map(bytes, made.segments(lambda number: iter([bytes_of(held[number])]))))
    assert len(data) == made.size
    for start, tensor in zip(made.starts, held, strict=True):
        assert start % 64 == 0
        assert data[start:].startswith(bytes(bytes_of(tensor)))
    return data


def random(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (count * ITEM_SIZES[dtype],))
    return bits.to(torch.uint8).view(DTYPES[dtype]).view(shape)


@pytest.mark.parametrize("dtype", ITEM_SIZES)
def test_torch_loads_every_dtype(tmp_path: Path, dtype: str) -> None:
    tensors = {f"shape {shape}": random(dtype, shape) for shape in SHAPES}
    data = archived(tensors)
    assert_same(torch.load(io.BytesIO(data), weights_only=True), tensors)
    (tmp_path / "file.pt").write_bytes(data)
    assert_same(torch.load(tmp_path / "file.pt", weights_only=True, mmap=True), tensors)


def test_it_is_pickled_as_torch_does() -> None:
    tensors = {"w": torch.ones(2, 3), "code": torch.ones(4, dtype=torch.uint16)}
    buffer = io.BytesIO()
    torch.save({**tensors, "step": 3}, buffer)
    records = [
        zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")
        for data in (buffer.getvalue(), archived(tensors, step=3))
    ]
    assert records[0] == records[1]


def test_checksums_are_right() -> None:
    tensors = {"a": torch.randn(3_000_000), "b": torch.randn(7)}
    with zipfile.ZipFile(io.BytesIO(archived(tensors, step=1))) as found:
        assert found.testzip() is None
        assert len(found.infolist()) == 5


def test_what_shares_memory_shares_it_again() -> None:
    one = torch.arange(6.0)
    state = {
        "a": ArchivedTensor(torch.float32, (6,), 0),
        "b": ArchivedTensor(torch.float32, (2, 3), 0),
    }
    made = TorchArchive(state)
    data = b"".join(map(bytes, made.segments(lambda number: iter([bytes_of(one)]))))
    found = torch.load(io.BytesIO(data), weights_only=True)
    found["a"][5] = 9.0
    assert found["b"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 9.0]]
    assert made.size < 2 * 6 * 4 + 1200


def test_values_lie_beside_tensors() -> None:
    values = {"step": 3, "lr": [0.1, None, True], "name": "ünï", "d": {"a": (1, 2)}}
    found = torch.load(io.BytesIO(archived({"w": torch.ones(2)}, **values)), weights_only=True)
    assert found.pop("w").tolist() == [1.0, 1.0]
    assert_same(found, values)
    assert torch.load(io.BytesIO(archived({}))) == {}


@pytest.mark.parametrize(
    ("value", "loads"),
    [
        (3, True),
        ([{"a": 1.5}], True),
        (torch.float16, True),
        (b"x", True),
        (b"", False),
        (frozenset("a"), False),
    ],
)
def test_what_the_guard_of_torch_takes(value: object, loads: bool) -> None:
    assert loads_weights_only(value) is loads


def test_what_cannot_be_held_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLeafError, match=r"'q' is a tensor of torch\.qint8"):
        TorchArchive({"q": ArchivedTensor(torch.qint8, (1,), 0)})
    with pytest.raises(UnsupportedLeafError, match="cannot be pickled"):
        TorchArchive({"f": lambda: 0})


def test_beyond_4_gib(tmp_path: Path) -> None:
    sizes = [5 << 30, 3, (1 << 32) - 1, 4]
    state = {
        f"t{number}": ArchivedTensor(torch.uint8, (size,), number)
        for number, size in enumerate(sizes)
    }
    made = TorchArchive(state)
    path = tmp_path / "file.pt"
    with path.open("wb") as file:  # sparse: no disk space, no time

        def elements(number: int) -> Iterator[memoryview]:
            assert file.tell() == made.starts[number]
            file.seek(sizes[number] - 3, os.SEEK_CUR)
            file.write(b"end")
            yield memoryview(b"")

        for segment in made.segments(elements):
            file.write(segment)
    assert path.stat().st_size == made.size
    entries = zipfile.ZipFile(path).infolist()[3:]
    assert [entry.file_size for entry in entries] == sizes
    found = torch.load(path, weights_only=True, mmap=True)
    for name, size in zip(state, sizes, strict=True):
        assert found[name].shape == (size,) and bytes(found[name][-3:].tolist()) == b"end"


@pytest.mark.slow
def test_more_entries_than_16_bits_count() -> None:
    state = {str(n): ArchivedTensor(torch.uint8, (1,), n) for n in range(66_000)}
    made = TorchArchive(state)
    data = io.BytesIO()
    for segment in made.segments(lambda number: iter([memoryview(bytes([number % 251]))])):
        data.write(segment)
    data.seek(0)
    found = torch.load(data, weights_only=True)
    assert len(found) == 66_000 and found["65999"].item() == 65_999 % 251
