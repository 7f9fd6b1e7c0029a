"""What torch.save wrote is found; what it never writes is refused by name."""

import io
import os
import pickle
import random
import struct
import zipfile
import zlib

import pytest
import torch

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.formats.torch_zip import (
    StoredTensor,
    frame_tensor,
    parse_state_zip,
    parse_tensor_zip,
)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def parse(item: bytes):
    return parse_tensor_zip(lambda at, n: item[at : at + n], len(item))


def strided(item: bytes) -> torch.Tensor:
    """The tensor that the parser describes."""
    found = parse(item)
    payload = bytearray(item[found.payload_offset :][: found.payload_bytes])
    flat = torch.frombuffer(payload, dtype=found.dtype)
    return flat.as_strided(found.sizes, found.strides, found.storage_offset)


def rezipped(pickled, payload=b"\0" * 24, order=b"little", compression=zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", order)
        file.writestr("archive/data/0", payload)
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def tensor_pickle(sizes=b"K\x02K\x03\x86", strides=b"K\x03K\x01\x86", offset=b"K\x00", numel=6):
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        b"X\x01\0\0\x000X\x03\0\0\0cpuK" + bytes([numel]) + b"tQ" + offset + sizes + strides
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


def test_views_keep_offset_and_strides():
    base = torch.arange(60.0).reshape(6, 10)
    for view in (base[2:, 3:7], base.t(), base[::2, ::3], base[3], base[0, :1].expand(5, 1)):
        assert torch.equal(strided(saved(view)), view)
    assert parse(saved(base[2:, 3:7])).storage_offset == 23
    assert not parse(saved(base.t())).is_contiguous
    assert parse(saved(base[:, 3:3])).sizes == (6, 0)


def test_parameters_are_tensors():
    parameter = torch.nn.Parameter(torch.arange(5.0))
    assert torch.equal(strided(saved(parameter)), parameter.detach())


def test_any_root_name(tmp_path):
    path = tmp_path / "some name.pt"
    torch.save(torch.arange(4), path)
    assert strided(path.read_bytes()).tolist() == [0, 1, 2, 3]


def test_a_long_item_takes_few_small_reads():
    item = saved(torch.arange(100_000))
    reads = []

    def read(offset: int, nbytes: int) -> bytes:
        reads.append(nbytes)
        return item[offset : offset + nbytes]

    found = parse_tensor_zip(read, len(item))
    assert found.payload_bytes == 800_000 and len(reads) == 2 and sum(reads) <= 16384


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.ones(2, 2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
    ],
)
def test_other_tensors_are_refused_by_name(value, named):
    with pytest.raises(UnsafeCheckpointError, match=named):
        parse(saved(value))


def test_no_code_runs(tmp_path):
    class Evil:
        def __init__(self, call, *args):
            self.call, self.args = call, args

        def __reduce__(self):
            return self.call, self.args

    target = tmp_path / "made"
    for evil, named in (
        (Evil(os.mkdir, str(target)), "mkdir"),
        (Evil(os.system, f"touch {target}"), "system"),
        (Evil(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
        (Evil(eval, "1"), "builtins.eval"),
    ):
        with pytest.raises(UnsafeCheckpointError, match=named):
            parse(rezipped(pickle.dumps(evil, protocol=2)))
    assert not target.exists()


def test_the_made_up_item_is_good():
    assert parse(rezipped(tensor_pickle())).sizes == (2, 3)


@pytest.mark.parametrize(
    ("item", "error", "said"),
    [
        (rezipped(tensor_pickle(), order=b"big"), FormatError, "big"),
        (rezipped(tensor_pickle(), b"\0" * 20), FormatError, "record of 20 bytes"),
        (rezipped(tensor_pickle(numel=5), b"\0" * 20), FormatError, "reaches out"),
        (rezipped(tensor_pickle(offset=b"K\x01")), FormatError, "reaches out"),
        (rezipped(tensor_pickle(strides=b"K\x04K\x01\x86")), FormatError, "reaches out"),
        (rezipped(tensor_pickle(strides=b"K\x01\x85")), FormatError, "2 sizes and 1 strides"),
        (rezipped(tensor_pickle(sizes=b"J\xff\xff\xff\xffK\x03\x86")), FormatError, "count"),
        (rezipped(tensor_pickle(sizes=b"\x8a\x10" + b"\x7f" * 16 + b"\x85")),
         UnsafeCheckpointError, r"2\*\*63"),
        (rezipped(tensor_pickle(sizes=b"(" + b"K\x01" * 2000 + b"t")),
         UnsafeCheckpointError, "2000 dimensions"),
        (rezipped(tensor_pickle(), compression=zipfile.ZIP_DEFLATED), FormatError, "compressed"),
        (rezipped(tensor_pickle() + b"\0" * 100_000), UnsafeCheckpointError, "claims 1001"),
        (rezipped(b"\x80\x02]."), FormatError, "a list where a tensor"),
        (b"", FormatError, "too few"),
        (b"PK" * 100, FormatError, "end record"),
    ],
)  # fmt: skip
def test_malformed_items_are_refused(item, error, said):
    with pytest.raises(error, match=said):
        parse(item)


def test_lazy_conjugates_are_refused():
    with pytest.raises(FormatError, match="conjugate"):
        parse(saved(torch.ones(2, dtype=torch.complex64).conj()))


def test_duplicate_names_and_many_entries():
    for names, said in ((["archive/aa", "archive/bb"], "twice"), (map(str, range(99)), "absurd")):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as file:
            for name in names:
                file.writestr(name, b"\x80\x02N.")
        with pytest.raises(CheckpointError, match=said):
            parse(buffer.getvalue().replace(b"/bb", b"/aa"))


def test_a_zip64_record_cannot_ask_for_memory():
    item = bytearray(rezipped(tensor_pickle()))
    end = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 4, 4, 1 << 60, 0)
    end += struct.pack("<4sIQI", b"PK\x06\x07", 0, len(item) - 22, 1)
    with pytest.raises(UnsafeCheckpointError, match="absurd"):
        parse(bytes(item[:-22]) + end + item[-22:])


def test_truncation_is_noticed_at_every_byte():
    item = saved(torch.arange(3))
    for length in range(len(item)):
        with pytest.raises(FormatError):
            parse(item[:length])


def test_a_changed_byte_gives_a_tensor_or_a_named_error():
    """Nothing but the errors of the package, whatever a flipped byte does."""
    rng = random.Random(7)
    frame = frame_tensor(torch.int32, (4, 2))
    framed = frame.head + bytes(range(32)) + frame.tail(zlib.crc32(bytes(range(32))))
    for item in (framed, saved(torch.arange(8).reshape(2, 4))):
        for _ in range(2500):
            changed = bytearray(item)
            for _ in range(rng.choice((1, 1, 2, 8))):
                changed[rng.randrange(len(item))] = rng.randrange(256)
            try:
                found = parse(bytes(changed))
            except CheckpointError:
                continue
            assert 0 <= found.payload_offset <= len(item) - found.payload_bytes


def parse_state(state: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    item = saved(state)
    found = parse_state_zip(lambda offset, nbytes: item[offset : offset + nbytes], len(item))
    for name, stored in found.items():
        elements = torch.frombuffer(
            bytearray(item[stored.payload_offset :][: stored.payload_bytes]), dtype=stored.dtype
        )
        again = elements.as_strided(stored.sizes, stored.strides, stored.storage_offset)
        assert torch.equal(again, state[name]), name
    return found


def test_a_state_dict() -> None:
    base = torch.arange(24.0).view(4, 6)
    found = parse_state({"a": base, "b": base, "t": base.t(), "row": base[1], "column": base[:, 2]})
    assert {stored.payload_offset for stored in found.values()} == {found["a"].payload_offset}
    row_major = {name: stored.is_row_major for name, stored in found.items()}
    assert row_major == {"a": True, "b": True, "t": False, "row": True, "column": False}
    assert found["a"].is_contiguous and not found["row"].is_contiguous
    assert (found["row"].storage_offset, found["row"].payload_bytes) == (6, 96)


def test_the_state_dict_of_a_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    assert list(parse_state(model.state_dict())) == list(model.state_dict())
