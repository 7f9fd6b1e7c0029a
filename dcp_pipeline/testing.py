"""Contract tests for a storage or serialization of one's own; needs pytest.

Subclass a contract in a test module and give its fixtures: pytest collects the rest.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from typing import Any

try:
    import pytest
except ImportError as error:
    raise ImportError("dcp_pipeline.testing needs pytest: pip install pytest") from error

import torch

from dcp_pipeline.core.errors import (
    ConcurrentSaveError,
    ConfigError,
    CorruptCheckpointError,
    MissingFileError,
    PeerFailedError,
    UnsafeCheckpointError,
    UnsupportedLeafError,
)
from dcp_pipeline.serialization.base import Serialization
from dcp_pipeline.storage.base import Directory, Storage
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Item

__all__ = ["SerializationContract", "StorageContract"]

_VALUES: list[Any] = [
    None,
    True,
    -3,
    10**30,
    0.1,
    float("inf"),
    1 + 2j,
    "text",
    b"\0\xff",
    [],
    [1, [2]],
]
_VALUES += [(1, "a"), {"a": 1, 2: "b"}, {1, 2}, torch.float16, torch.Size([2, 3])]


class StorageContract:
    """What every kind of storage promises.

    A subclass gives the fixture ``storage``, and ``location`` for the id of a directory that is not
    there yet; pytest then runs every test below against it::

        class TestMine(StorageContract):
            @pytest.fixture
            def storage(self):
                return MyStorage()

            @pytest.fixture
            def location(self):
                return f"mine://{uuid.uuid4().hex}"
    """

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    @pytest.fixture
    def location(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def directory(self, storage: Storage, location: str) -> Directory:
        directory = storage.open(location)
        directory.prepare()
        return directory

    def test_nothing_is_touched_by_opening(self, storage: Storage, location: str) -> None:
        directory = storage.open(location)
        assert directory.names() == [] and not directory.exists("a")
        with pytest.raises(MissingFileError) as caught:
            directory.read("a")
        assert caught.value.errno == errno.ENOENT
        directory.prepare()
        directory.prepare()

    def test_small_files(self, storage: Storage, directory: Directory, location: str) -> None:
        directory.put("b", b"0123456789")
        directory.put("a", b"")
        directory.sync()
        again = storage.open(location)
        assert again.names() == ["a", "b"] and again.exists("b")
        assert (again.size("a"), again.size("b")) == (0, 10)
        for arguments, wanted in {
            (): b"0123456789",
            (3,): b"3456789",
            (3, 2): b"34",
            (-4,): b"6789",
            (-4, 2): b"67",
            (-40, 2): b"01",
            (9, 5): b"9",
            (20,): b"",
        }.items():
            assert again.read("b", *arguments) == wanted, arguments
        assert again.read("a") == b""

    @pytest.mark.parametrize("step", [1000, 300_001])
    def test_ranges_of_one_file(self, directory: Directory, step: int) -> None:
        data = random.Random(7).randbytes(1_000_003)
        places = list(range(0, len(data), step))
        random.Random(8).shuffle(places)
        with directory.open_ranges("a", len(data)) as one, directory.open_ranges(
            "a", len(data)
        ) as other:  # fmt: skip
            for number, place in enumerate(places):
                part = memoryview(data)[place : place + step]
                (one, other)[number % 2].write(place, part)
        assert directory.read("a") == data
        with directory.open_ranges("b", 3) as longer:
            longer.write(2, memoryview(b"xyz"))
        assert directory.read("b") == b"\0\0xyz"

    def test_files_get_their_final_names(self, directory: Directory) -> None:
        directory.put("old", b"old")
        directory.put("gone", b"gone")
        directory.put("a.part", b"a")
        directory.put("b.part", b"b")
        seen = {name: directory.token(name) for name in ("old", "index")}
        assert seen["index"] is None and seen["old"] == directory.token("old")
        files = [("a.part", "a"), ("b.part", "old")]
        directory.adopt(files, ("index", b"1"), ["gone"], seen)
        assert directory.names() == ["a", "index", "old"]
        assert [directory.read(name) for name in ("a", "index", "old")] == [b"a", b"1", b"b"]
        assert directory.token("old") != seen["old"]
        directory.put("c.part", b"c")
        for changed in ({"old": seen["old"]}, {"index": None}, {"nothing": "x"}):
            with pytest.raises(ConcurrentSaveError):
                directory.adopt([("c.part", "c")], ("index", b"2"), [], changed)
        assert directory.names() == ["a", "c.part", "index", "old"]
        assert directory.read("index") == b"1"
        directory.adopt([("c.part", "c")], None, [], {"index": directory.token("index")})
        assert directory.read("c") == b"c"

    def test_a_name_is_taken_once(self, directory: Directory) -> None:
        directory.put("a", b"1")
        with pytest.raises(OSError) as caught:
            directory.put("a", b"2")
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(OSError):
            directory.write("a", 1, [memoryview(b"2")], lambda data: None, 4096)
        assert directory.read("a") == b"1"

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 100_000, 3_000_000])
    @pytest.mark.parametrize("pieces", [1, 7])
    def test_data_files(self, directory: Directory, size: int, pieces: int) -> None:
        data = random.Random(size).randbytes(size)
        seen: list[bytes] = []
        step = -(-size // pieces) or 1
        segments = [memoryview(data[at : at + step]) for at in range(0, size, step)]
        directory.write("d", size, iter(segments), lambda view: seen.append(bytes(view)), 4096)
        assert b"".join(seen) == data
        assert all(len(part) % 4096 == 0 for part in seen[:-1])
        assert directory.read("d") == data and directory.size("d") == size
        with directory.open("d") as source:
            assert source.size == size
            target = bytearray(min(size, 5))
            source.read_into(size - len(target), memoryview(target))
            assert bytes(target) == data[size - len(target) :]
            with pytest.raises(CorruptCheckpointError, match="cut off"):
                source.read_into(size, memoryview(bytearray(1)))

    @pytest.mark.parametrize("size", [3, 5, 10_000])
    def test_a_file_of_another_size_than_planned(self, directory: Directory, size: int) -> None:
        with pytest.raises(ValueError, match="4 bytes were produced"):
            directory.write("d", size, [memoryview(b"1234")], lambda data: None, 4096)

    def test_an_observer_stops_the_writing(self, directory: Directory) -> None:
        def stop(data: memoryview) -> None:
            raise PeerFailedError

        with pytest.raises(PeerFailedError):
            directory.write("d", 4, [memoryview(b"1234")], stop, 4096)

    def test_age(self, directory: Directory) -> None:
        directory.put("a", b"")
        assert 0 <= directory.age("a") < 60
        directory.renew("a")
        assert 0 <= directory.age("a") < 60 and directory.read("a") == b""
        with pytest.raises(MissingFileError):
            directory.age("none")

    def test_deleting(self, directory: Directory) -> None:
        for name in "abc":
            directory.put(name, b"")
        directory.delete(["a", "none", "c", "a"])
        assert directory.names() == ["b"]

    def test_a_commit_replaces_what_it_expects(self, directory: Directory) -> None:
        directory.put("old", b"x")
        directory.commit("record", b"1", None, [("also", b"a"), ("none", None)])
        assert directory.names() == ["also", "old", "record"]
        directory.commit("record", b"2", b"1", [("also", None), ("old", b"y")])
        assert directory.names() == ["old", "record"]
        assert (directory.read("record"), directory.read("old")) == (b"2", b"y")

    @pytest.mark.parametrize("expected", [None, b"0", b""])
    def test_a_commit_over_another_changes_nothing(
        self, directory: Directory, expected: bytes | None
    ) -> None:
        directory.commit("record", b"1", None, [("also", b"a")])
        with pytest.raises(ConcurrentSaveError):
            directory.commit("record", b"2", expected, [("also", None)])
        assert directory.names() == ["also", "record"]
        assert (directory.read("record"), directory.read("also")) == (b"1", b"a")

    def test_one_of_several_commits_at_once_wins(self, storage: Storage, location: str) -> None:
        storage.open(location).prepare()
        outcomes: list[str] = []

        def commit(number: int) -> None:
            try:
                storage.open(location).commit("record", str(number).encode(), None, [])
                outcomes.append(str(number))
            except ConcurrentSaveError:
                outcomes.append("lost")

        threads = [threading.Thread(target=commit, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = set(outcomes) - {"lost"}
        assert len(outcomes) == 8 and outcomes.count("lost") == 7
        directory = storage.open(location)
        assert directory.read("record") == winner.encode() and directory.names() == ["record"]

    @pytest.mark.parametrize(
        "name",
        ["../a", "/etc/passwd", "a/../../b", "a/..", "a//b", "a/", "./a", "..", ".", "", "a\0b"],
    )
    def test_names_that_lead_elsewhere(self, directory: Directory, name: str) -> None:
        for action in (
            lambda: directory.read(name),
            lambda: directory.open(name),
            lambda: directory.size(name),
            lambda: directory.exists(name),
            lambda: directory.names_below(name),
        ):
            with pytest.raises(UnsafeCheckpointError):
                action()
        self._refuses_to_change(directory, name)

    def _refuses_to_change(self, directory: Directory, name: str) -> None:
        actions: list[Callable[[], None]] = [
            lambda: directory.put(name, b""),
            lambda: directory.write(name, 0, [], lambda data: None, 4096),
            lambda: directory.delete([name]),
            lambda: directory.commit(name, b"", None, []),
        ]
        for action in actions:
            with pytest.raises(UnsafeCheckpointError):
                action()

    @pytest.mark.parametrize("follow_links", [False, True])
    def test_files_in_folders_are_read_and_never_changed(
        self, storage: Storage, location: str, follow_links: bool
    ) -> None:
        below = storage.open(f"{location}/a/b")
        below.prepare()
        below.put("file", b"0123")
        below.put("another", b"")
        directory = storage.open(location, follow_links=follow_links)
        assert directory.names_below("a/b") == ["a/b/another", "a/b/file"]
        assert directory.names_below("a/c") == []
        assert directory.exists("a/b/file") and not directory.exists("a/b/none")
        assert directory.read("a/b/file", 1, 2) == b"12" and directory.size("a/b/file") == 4
        with directory.open("a/b/file") as source:
            assert (source.name, source.size) == ("a/b/file", 4)
        for action in (lambda: directory.read("a/c/file"), lambda: directory.open("x/file")):
            with pytest.raises(MissingFileError):
                action()
        self._refuses_to_change(directory, "a/b/file")
        assert below.read("file") == b"0123"

    def test_folders(self, storage: Storage, location: str) -> None:
        assert storage.folders(location) == []
        for name in ("b", "a", "a.b"):
            storage.open(f"{location}/{name}").prepare()
            storage.open(f"{location}/{name}").put("file", b"0123")
        storage.open(f"{location}x/c").prepare()
        assert storage.folders(location) == ["a", "a.b", "b"]
        assert storage.folders(f"{location}/a") == []

    def test_a_retired_checkpoint_is_out_of_sight_at_once(
        self, storage: Storage, location: str
    ) -> None:
        for name in ("a", "b"):
            storage.open(f"{location}/{name}").prepare()
            storage.open(f"{location}/{name}").put("file", b"0123")
        delete = storage.retire(f"{location}/a")
        assert storage.open(f"{location}/a").names() == []
        again = storage.open(f"{location}/a")
        again.prepare()
        again.put("file", b"new")
        delete()
        assert storage.folders(location) == ["a", "b"]
        assert again.read("file") == b"new"
        assert storage.open(f"{location}/b").read("file") == b"0123"

    def test_locations_of_another_scheme(self, storage: Storage) -> None:
        with pytest.raises(ConfigError, match="s3"):
            storage.open("s3://bucket/key")


class SerializationContract:
    """What every kind of serialization promises; a subclass gives the fixture ``serialization``."""

    @pytest.fixture
    def serialization(self) -> Serialization:
        raise NotImplementedError

    @staticmethod
    def items(serialization: Serialization) -> list[Item]:
        """Boxes of every dtype that it takes, whole and partial, dense and strided."""
        found = []
        for name, dtype in DTYPES.items():
            try:
                serialization.check_dtype(name)
            except UnsupportedLeafError:
                continue
            raw = torch.arange(48 * dtype.itemsize).remainder(2).to(torch.uint8)
            tensor = raw.view(dtype).view(6, 8)
            found.append(Item(f"{name}.whole", (0, 0), (6, 8), (6, 8), name, tensor))
            found.append(Item(f"{name}.part", (6, 8), (6, 8), (12, 16), name, tensor))
        strided = torch.arange(24.0).view(4, 6).t()
        found.append(Item("strided", (0, 0), (6, 4), (6, 4), "float32", strided))
        found.append(Item("scalar", (), (), (), "float64", torch.tensor(3.0, dtype=torch.float64)))
        return found

    def test_an_image_is_what_it_says(self, serialization: Serialization) -> None:
        values = [Item(f"v{n}", (), (), (), None, serialization.encode_value(n)) for n in (0, 1)]
        items = [values[0], *self.items(serialization), values[1]]
        image = serialization.image(items)
        data = b"".join([bytes(segment) for segment in image.segments()])
        assert len(data) == image.size
        assert data == b"".join([bytes(segment) for segment in image.segments()])
        places = list(zip(items, image.offset, image.length, image.payload, strict=True))
        previous = 0
        for _, offset, length, _ in sorted(places, key=lambda place: int(place[1])):
            assert previous <= offset and offset + length <= image.size
            previous = offset + length
        starts = [int(place[1]) for place in places if place[0].dtype is not None]
        assert starts == sorted(starts)
        for item, offset, length, payload in places:
            begin = int(offset + payload)
            if isinstance(item.data, bytes):
                assert data[begin : int(offset + length)] == item.data
            else:
                flat = item.data.contiguous().view(-1).view(torch.uint8)
                assert data[begin : begin + flat.numel()] == flat.numpy().tobytes(), item.name

    def test_no_items(self, serialization: Serialization) -> None:
        image = serialization.image([])
        assert sum(map(len, image.segments())) == image.size
        assert len(image.offset) == 0

    @pytest.mark.parametrize("value", _VALUES, ids=repr)
    def test_values(self, serialization: Serialization, value: Any) -> None:
        loaded = serialization.decode_value(serialization.encode_value(value))
        assert loaded == value and type(loaded) is type(value)

    def test_what_cannot_be_read_is_not_written(self, serialization: Serialization) -> None:
        with pytest.raises(UnsupportedLeafError):
            serialization.encode_value(_Custom())

    def test_equal_values_compare_equal(self, serialization: Serialization) -> None:
        one = serialization.encode_comparable({"a": [1, 2.0], "b": {3, 4}})[1]
        other = serialization.encode_comparable({"a": [1, 2.0], "b": {4, 3}})[1]
        assert one == other != serialization.encode_comparable({"a": [1, 2.5]})[1]

    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"?"]
    )
    def test_damaged_values(
        self, serialization: Serialization, damage: Callable[[bytes], bytes]
    ) -> None:
        with pytest.raises(CorruptCheckpointError):
            serialization.decode_value(damage(serialization.encode_value([1, 2])))


class _Custom:
    """Nothing that a checkpoint can hold."""
