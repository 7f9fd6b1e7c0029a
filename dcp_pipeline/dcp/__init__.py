"""Storage writers and readers for ``torch.distributed.checkpoint``, over our format and commit."""

from dcp_pipeline.dcp.huggingface import (
    HuggingFaceStorageReader,
    QuantizedHuggingFaceStorageReader,
)
from dcp_pipeline.dcp.huggingface_writer import HuggingFaceStorageWriter
from dcp_pipeline.dcp.mega import MegaStorageReader, MegaStorageWriter
from dcp_pipeline.dcp.reader import FileSystemReader
from dcp_pipeline.dcp.writer import FileSystemWriter

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "MegaStorageReader",
    "MegaStorageWriter",
    "QuantizedHuggingFaceStorageReader",
]
