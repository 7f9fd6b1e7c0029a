"""The frame around a payload is what torch, zipfile and our own parser read back."""

import io
import os
import random
import time
import zipfile
import zlib

import pytest
import torch

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.formats.torch_zip import frame_tensor, parse_tensor_zip

NAMES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2"
).split()
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, once a process
DTYPES = [getattr(torch, name) for name in NAMES]
SHAPES = [(), (0,), (3,), (1, 1), (2, 0, 4), (2, 3, 4, 5), (300, 70)]


def item_of(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """An item with random payload, and the payload."""
    frame = frame_tensor(dtype, shape)
    payload = random.Random(str((dtype, shape))).randbytes(frame.payload_bytes)
    if dtype is torch.bool:
        payload = bytes(byte & 1 for byte in payload)
    tail = frame.tail(zlib.crc32(payload))
    assert len(tail) == frame.tail_bytes
    assert len(frame.head) % 64 == 0
    return frame.head + payload + tail, payload


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_torch_and_zipfile_read_what_is_framed(dtype):
    for shape in SHAPES:
        item, payload = item_of(dtype, shape)
        assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None
        for weights_only in (True, False):
            tensor = torch.load(io.BytesIO(item), weights_only=weights_only)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            assert tensor.is_contiguous() and not tensor.requires_grad
            assert raw(tensor) == payload
        stored = parse_tensor_zip(lambda at, n, item=item: item[at : at + n], len(item))
        assert (stored.dtype, stored.sizes, stored.strides) == (dtype, shape, tensor.stride())
        assert item[stored.payload_offset :][: stored.payload_bytes] == payload
        assert stored.is_contiguous and stored.crc32 == zlib.crc32(payload)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_our_parser_reads_what_torch_saves(dtype):
    for shape in SHAPES:
        _, payload = item_of(dtype, shape)
        tensor = torch.load(io.BytesIO(item_of(dtype, shape)[0]))
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        item = buffer.getvalue()
        stored = parse_tensor_zip(lambda at, n, item=item: item[at : at + n], len(item))
        assert (stored.dtype, stored.sizes, stored.strides) == (dtype, shape, tensor.stride())
        assert stored.storage_offset == 0 and stored.is_contiguous
        assert item[stored.payload_offset :][: stored.payload_bytes] == payload


def test_same_tensor_is_same_bytes():
    assert item_of(torch.float32, (5, 7)) == item_of(torch.float32, (5, 7))


def test_many_small_tensors_are_framed_quickly():
    start = time.perf_counter()
    for row in range(20_000):
        frame_tensor(torch.float32, (row, 64)).tail(row)
    assert time.perf_counter() - start < 2.0  # 0.3 s on an idle core; the machine may be busy


@pytest.mark.parametrize("payload_bytes", [(1 << 32) - 1, 1 << 32, 5 << 30])
def test_zip64(tmp_path, payload_bytes):
    frame = frame_tensor(torch.uint8, (payload_bytes,))
    path = tmp_path / "item"
    with path.open("wb") as file:  # sparse: no disk space, no time
        file.write(frame.head)
        file.seek(payload_bytes - 3, os.SEEK_CUR)
        file.write(b"end")
        file.write(frame.tail(7))
    entry = zipfile.ZipFile(path).getinfo("archive/data/0")
    assert (entry.file_size, entry.CRC) == (payload_bytes, 7)
    tensor = torch.load(path, mmap=True)
    assert tensor.shape == (payload_bytes,) and bytes(tensor[-3:].tolist()) == b"end"
    reads = []
    with path.open("rb") as file:

        def read(offset: int, nbytes: int) -> bytes:
            reads.append(nbytes)
            file.seek(offset)
            return file.read(nbytes)

        stored = parse_tensor_zip(read, path.stat().st_size)
    assert (stored.payload_offset, stored.payload_bytes) == (len(frame.head), payload_bytes)
    assert len(reads) <= 2 and sum(reads) <= 16384


def test_unsupported_dtype_and_bad_sizes():
    with pytest.raises(UnsupportedLeafError, match="qint8"):
        frame_tensor(torch.qint8, (1,))
    with pytest.raises(ValueError, match="negative"):
        frame_tensor(torch.int8, (2, -1))
    with pytest.raises(ValueError, match=r"2\*\*63"):
        frame_tensor(torch.int64, (1 << 40, 1 << 20))
