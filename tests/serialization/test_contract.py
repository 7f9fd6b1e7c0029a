"""Our kinds of serialization keep the contract that anybody's has to keep."""

import pytest

from dcp_pipeline.serialization.base import Serialization
from dcp_pipeline.serialization.mega import MegaSerialization
from dcp_pipeline.serialization.safetensors import SafetensorsSerialization
from dcp_pipeline.serialization.torch_save import TorchSaveSerialization
from dcp_pipeline.testing import SerializationContract


class TestTorchSave(SerializationContract):
    @pytest.fixture
    def serialization(self) -> Serialization:
        return TorchSaveSerialization()


class TestSafetensors(SerializationContract):
    @pytest.fixture
    def serialization(self) -> Serialization:
        return SafetensorsSerialization()


class TestMega(SerializationContract):
    @pytest.fixture(params=["none", "crc32", "sha256"])
    def serialization(self, request: pytest.FixtureRequest) -> Serialization:
        return MegaSerialization(checksum=request.param, chunk_bytes=64)
