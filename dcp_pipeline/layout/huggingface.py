"""Layout ``huggingface``: a model repository as ``transformers`` and its like know it."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, NoReturn

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.layout.huggingface_index import block_size
from dcp_pipeline.layout.huggingface_quantized import dequantized
from dcp_pipeline.layout.huggingface_reading import manifest_of, read_repository
from dcp_pipeline.storage.base import Directory

__all__ = ["HuggingFaceLayout"]


class HuggingFaceLayout(Layout):
    """Flat tensors in ``*.safetensors``, or in ``pytorch_model.bin``; no digests.

    Args:
        dequantize: dtype that codes and scales are read as; ``none`` leaves them as they are.
        block_size: rows and columns of a block of float8 that share a scale; ``None`` for what
            ``config.json`` says, or 128.
    """

    kind: ClassVar[str] = "huggingface"
    record: ClassVar[str] = "model.safetensors.index.json"
    follows_links: ClassVar[bool] = True

    def __init__(self, dequantize: str = "none", block_size: int | None = None) -> None:
        self.checksum = "xxh3_64"
        self.block_bytes = 64 << 10
        self._dequantize = dequantize
        self._block_size = block_size

    def open(self, directory: Directory) -> Manifest:
        found = read_repository(directory)
        if self._dequantize == "none":
            return manifest_of(found, directory.location)
        size = self._block_size
        block = block_size(directory) if size is None else (size, size)
        quantized = dequantized(found, self._dequantize, block)
        return manifest_of(found, directory.location, quantized)

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        _refuse()

    def sums_name(self, rank: int, save_id: str) -> str:
        _refuse()

    def marker_name(self, save_id: str) -> str:
        _refuse()

    def companions(
        self, manifest: Manifest, location: str, dcp_reads: bool
    ) -> tuple[Manifest, list[tuple[str, bytes | None]]]:
        _refuse()

    def current(self, directory: Directory) -> tuple[bytes | None, str | None]:
        _refuse()

    def replaced_names(self, directory: Directory) -> Collection[str]:
        _refuse()

    def needed(self, directory: Directory) -> Collection[str]:
        _refuse()

    def committed_save(self, directory: Directory) -> str | None:
        _refuse()

    def save_of(self, name: str) -> str | None:
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError("layout huggingface reads repositories, and writes none", "layout")
