"""What every kind of storage promises; the classes at the end name the kinds."""

import errno
import os
import random
import threading
import uuid
from pathlib import Path

import pytest

from dcp_pipeline.core.errors import (
    ConcurrentSaveError,
    ConfigError,
    CorruptCheckpointError,
    MissingFileError,
    PeerFailedError,
    UnsafeCheckpointError,
)
from dcp_pipeline.storage.base import Directory, Storage
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.storage.memory import MemoryStorage


class Contract:
    """A subclass says how its storage is made and what a directory of it is called."""

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
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

    @pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", "", "a\0b"])
    def test_names_that_lead_elsewhere(self, directory: Directory, name: str) -> None:
        for action in (
            lambda: directory.read(name),
            lambda: directory.open(name),
            lambda: directory.put(name, b""),
            lambda: directory.exists(name),
            lambda: directory.delete([name]),
            lambda: directory.commit(name, b"", None, []),
        ):
            with pytest.raises(UnsafeCheckpointError):
                action()

    def test_locations_of_another_scheme(self, storage: Storage) -> None:
        with pytest.raises(ConfigError, match="s3"):
            storage.open("s3://bucket/key")


class TestFileSystem(Contract):
    @pytest.fixture(params=["direct", "buffered", "unsynced"])
    def storage(self, request: pytest.FixtureRequest) -> Storage:
        return FileSystemStorage(
            direct_io=request.param == "direct",
            sync_files=request.param != "unsynced",
            reserve_space=request.param != "unsynced",
            buffer_bytes=64 << 10,
        )

    @pytest.fixture
    def location(self, tmp_path: Path) -> str:
        return str(tmp_path / "deep" / "er")

    def test_uris(self, storage: Storage, tmp_path: Path) -> None:
        assert storage.open(f"file://{tmp_path}/a%20b").location == f"{tmp_path}/a b"
        with pytest.raises(ConfigError):
            storage.open("file://host/path")

    def test_links(self, directory: Directory, tmp_path: Path) -> None:
        """Inside the checkpoint a link is followed, out of it never."""
        (tmp_path / "secret").write_bytes(b"secret")
        directory.put("data", b"data")
        os.symlink("data", os.path.join(directory.location, "inside"))
        os.symlink(tmp_path / "secret", os.path.join(directory.location, "outside"))
        assert directory.read("inside") == b"data"
        with pytest.raises(UnsafeCheckpointError, match="outside"):
            directory.read("outside")


class TestMemory(Contract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()

    @pytest.fixture
    def location(self) -> str:
        return f"memory://{uuid.uuid4().hex}/step"
