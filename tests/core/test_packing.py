import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.packing import pack_columns, unpack_columns
from dcp_pipeline.core.path import Index, assign_names, decode_path, dotted, encode_path
from dcp_pipeline.core.sums import BlockSums, encode_sums, parse_sums
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind, decode_keys, encode_keys

EXTREMES = [0, 1, -1, 127, 128, -128, -129, 1 << 15, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63)]
COLUMNS = arrays.arrays(
    np.int64,
    arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=20),
    elements=st.one_of(st.sampled_from(EXTREMES), st.integers(-(1 << 63), (1 << 63) - 1)),
)


@given(st.dictionaries(st.text(max_size=8), COLUMNS, max_size=4))
@settings(max_examples=200, deadline=None)
def test_columns_come_back(columns: dict[str, np.ndarray]) -> None:
    found = unpack_columns(pack_columns(columns))
    assert list(found) == list(columns)
    for name, column in columns.items():
        assert found[name].dtype == np.int64 and found[name].shape == column.shape
        assert np.array_equal(found[name], column)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_columns_are_a_format_error_or_other_columns(data: st.DataObject) -> None:
    whole = bytearray(pack_columns({"a": np.arange(50), "b": np.ones((10, 3), np.int64)}))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack_columns(whole)
    except FormatError:
        return
    assert all(column.dtype == np.int64 for column in found.values())


@pytest.mark.parametrize("cut", [0, 3, 4, 10, 50, -1])
def test_cut_off_columns(cut: int) -> None:
    whole = pack_columns({"a": np.arange(1000), "b": np.arange(1000) ** 3})
    with pytest.raises(FormatError):
        unpack_columns(whole[:cut])


@pytest.mark.parametrize(
    "header",
    [
        b'[["a",[1000000000000],1,9]]',
        b'[["a",[-1],1,9]]',
        b'[["a",[3,3,3],1,9]]',
        b'[["a",[1],3,9]]',
        b'[["a",["x"],1,9]]',
        b'[["a",[100000000],8,9]]',
        b'{"a":1}',
        b"[1]",
        b"null",
        b"[" * 100000,
    ],
    ids=lambda header: header[:20].decode(),
)
def test_headers_that_ask_for_too_much(header: bytes) -> None:
    blob = pack_columns({"a": np.zeros(4, np.int64)})[-12:]
    with pytest.raises(FormatError):
        unpack_columns(len(header).to_bytes(4, "little") + header + blob)


COMPONENT = st.one_of(
    st.text(max_size=5),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.builds(Index, st.integers(0, 1000), st.booleans()),
)


@given(st.lists(COMPONENT, max_size=5))
@settings(max_examples=300, deadline=None)
def test_paths_come_back_with_their_types(parts: list) -> None:
    found = decode_path(encode_path(tuple(parts)))
    assert found == tuple(parts)
    assert list(map(type, found)) == list(map(type, parts))


@pytest.mark.parametrize(
    "encoded", ["a", None, {}, [[]], [["a"]], [{"float": 1}], [{"x": 1}], [[True]]]
)
def test_what_is_no_path(encoded: object) -> None:
    with pytest.raises(FormatError):
        decode_path(encoded)


@given(st.lists(st.lists(COMPONENT, min_size=1, max_size=3).map(tuple), unique_by=repr, max_size=8))
@settings(max_examples=200, deadline=None)
def test_names_are_unique_and_those_of_dcp_where_they_can_be(paths: list) -> None:
    # 1, 1.0 and True are one key of a mapping, so that only one of them can be there.
    paths = list({path: None for path in paths})
    names = assign_names(paths)
    assert len(set(names)) == len(paths)
    for path, name in zip(paths, names, strict=True):
        assert name == dotted(path) or name.startswith(f"{dotted(path)}#")
    if len(paths) < 5:
        for order in itertools.permutations(range(len(paths))):
            assert assign_names([paths[i] for i in order]) == [names[i] for i in order]


KEYS = (
    KeySpec(("a", Index(0), 1, None), Kind.TENSOR, "float32", (3, 4)),
    KeySpec(("b",), Kind.VALUE),
    KeySpec(("c", 1.5, True), Kind.ARRAY, "int8", ()),
    KeySpec(("d",), Kind.TENSOR, "float32", (3, 4), alias=0),
)


def test_keys_and_tables_come_back() -> None:
    assert decode_keys(encode_keys(KEYS)) == KEYS
    table = ChunkTable.build(
        KEYS, [0, 0, 1, 2], [(0, 0), (2, 0), (), ()], [(2, 4), (1, 4), (), ()], 3
    )
    found = ChunkTable.unpack(table.pack())
    assert found.keys == KEYS
    for name, column in table.columns("key", "owner", "file", "digest").items():
        assert np.array_equal(getattr(found, name), column)
    assert found.boxes(1) == ((2, 0), (1, 4)) and found.boxes(2) == ((), ())


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_table_is_a_format_error_or_a_table(data: st.DataObject) -> None:
    whole = bytearray(ChunkTable.build(KEYS, [0, 1], [(0, 0), ()], [(3, 4), ()]).pack())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        table = ChunkTable.unpack(whole)
    except FormatError:
        return
    assert not len(table) or table.key.max() < len(table.keys)


def sums_of(sizes: list[int]) -> list[BlockSums]:
    return [
        BlockSums(f"f{i}", size, "xxh3_64", 4096, bytes(range(i, i + 8)) * (-(-size // 4096)))
        for i, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("sizes", [[], [0], [1], [4096, 4097, 0, 12288]])
def test_sums_come_back(sizes: list[int]) -> None:
    sums = sums_of(sizes)
    assert list(parse_sums(encode_sums(sums, "xxh3_64", 4096)).values()) == sums


def test_every_damaged_byte_of_a_sums_file_is_an_error_or_another_digest() -> None:
    whole = encode_sums(sums_of([5000, 3]), "xxh3_64", 4096)
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        try:
            found = list(parse_sums(damaged).values())
        except ValueError:
            continue
        assert found != sums_of([5000, 3])
    for cut in range(len(whole)):
        with pytest.raises(FormatError):
            parse_sums(whole[:cut])
