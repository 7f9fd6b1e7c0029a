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


class TestMemory(StorageContract):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()

    @pytest.fixture
    def location(self) -> str:
        return f"memory://{uuid.uuid4().hex}/step"
