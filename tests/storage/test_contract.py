"""Our kinds of storage keep the contract that anybody's has to keep."""

import os
import uuid
from pathlib import Path

import pytest

from dcp_pipeline.core.errors import ConfigError, UnsafeCheckpointError
from dcp_pipeline.storage.base import Directory, Storage
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.storage.memory import MemoryStorage
from dcp_pipeline.testing import StorageContract


class TestFileSystem(StorageContract):
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

    def test_folders_that_are_links(self, directory: Directory, tmp_path: Path) -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret" / "file").write_bytes(b"secret")
        os.symlink(tmp_path / "secret", os.path.join(directory.location, "outside"))
        for action in (directory.read, directory.size, directory.exists):
            with pytest.raises(UnsafeCheckpointError, match="outside"):
                action("outside/file")
        with pytest.raises(UnsafeCheckpointError, match="outside"):
            directory.names_below("outside")

    def test_links_that_are_to_be_followed(self, storage: Storage, tmp_path: Path) -> None:
        """As in a cache of Hugging Face: what they lead to has to be a file all the same."""
        (tmp_path / "blobs").mkdir()
        (tmp_path / "blobs" / "file").write_bytes(b"blob")
        folder = tmp_path / "snapshot"
        folder.mkdir()
        os.symlink(tmp_path / "blobs" / "file", folder / "absolute")
        os.symlink("../blobs/file", folder / "relative")
        os.symlink(tmp_path / "blobs", folder / "below")
        os.symlink("/dev/zero", folder / "device")
        os.symlink(tmp_path / "blobs", folder / "folder")
        os.symlink("loop", folder / "loop")
        os.mkfifo(tmp_path / "blobs" / "pipe")
        os.symlink(tmp_path / "blobs" / "pipe", folder / "pipe")
        directory = storage.open(str(folder), follow_links=True)
        for name in ("absolute", "relative", "below/file"):
            assert directory.read(name) == b"blob" and directory.size(name) == 4
        assert directory.names_below("below") == ["below/file", "below/pipe"]
        for name in ("device", "folder", "pipe"):
            with pytest.raises(UnsafeCheckpointError, match="no file"):
                directory.open(name)
        with pytest.raises(OSError):
            directory.open("loop")


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()

    @pytest.fixture
    def location(self) -> str:
        return f"memory://{uuid.uuid4().hex}/step"
