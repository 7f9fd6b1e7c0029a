"""Layout ``huggingface``: a model repository as ``transformers`` and its like know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.huggingface_index import block_size
from dcp_pipeline.layout.huggingface_quantized import dequantized
from dcp_pipeline.layout.huggingface_reading import manifest_of, read_repository
from dcp_pipeline.layout.huggingface_writing import HuggingFaceWriting
from dcp_pipeline.storage.base import Directory

__all__ = ["HuggingFaceLayout"]


class HuggingFaceLayout(HuggingFaceWriting):
    """Flat tensors in ``*.safetensors``, or, to be read alone, in ``pytorch_model.bin``.

    Args:
        max_shard_bytes, file_of, tied, assets: see :class:`HuggingFaceWriting`.
        dequantize: dtype that codes and scales are read as; ``none`` leaves them as they are.
        block_size: rows and columns of a block of float8 that share a scale; ``None`` for what
            ``config.json`` says, or 128.
    """

    kind: ClassVar[str] = "huggingface"
    follows_links: ClassVar[bool] = True

    def __init__(
        self,
        dequantize: str = "none",
        block_size: int | None = None,
        max_shard_bytes: int = 5 * 10**9,
        file_of: Mapping[str, int] | None = None,
        tied: str = "drop",
        assets: str | None = None,
    ) -> None:
        super().__init__(max_shard_bytes, file_of, tied, assets)
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
