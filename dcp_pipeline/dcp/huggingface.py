"""DCP's readers of Hugging Face repositories, over ours."""

from __future__ import annotations

import os
from typing import Any

import torch

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.quantized import RESULTS
from dcp_pipeline.dcp.reader import FileSystemReader
from dcp_pipeline.types.dcp import Metadata
from dcp_pipeline.types.dtypes import dtype_name

__all__ = ["HuggingFaceStorageReader", "QuantizedHuggingFaceStorageReader"]


class HuggingFaceStorageReader(FileSystemReader):
    """Reads a model repository under DCP's ``load`` or ours, with any planner.

    Beyond what torch's class of that name reads, it takes ``pytorch_model.bin``, follows the index
    and the links of a cache, and checks files, index and headers against each other.

    Args:
        path: directory of the repository, a path or a ``file://`` URI.
        thread_count: threads that read.
    """

    def __init__(self, path: str | os.PathLike[str], thread_count: int = 1) -> None:
        self._set_up(path, thread_count, {"kind": "huggingface"})

    def _set_up(
        self, path: str | os.PathLike[str], thread_count: int, layout: dict[str, Any]
    ) -> None:
        config = {
            "layout": layout,
            "serialization": "safetensors",
            "storage": {"thread_count": thread_count},
        }
        super().__init__(path, config=config)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the repository holds; no rank has metadata of its own."""
        return super().read_metadata()


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads float8 in blocks and MXFP4 as the numbers that they stand for.

    The results have the keys of the codes, ``x.weight`` and ``x_blocks``. Codes may lie in one
    file, and their scales in another.

    Args:
        path, thread_count: as in :class:`HuggingFaceStorageReader`.
        target_dtype: bfloat16, float16 or float32.
        block_size: rows and columns of float8 that share a scale.

    Raises:
        ConfigError: another dtype.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
    ) -> None:
        name = dtype_name(target_dtype)
        if name not in RESULTS:
            raise ConfigError(
                f"found {target_dtype}; codes and scales are read as {', '.join(RESULTS)}",
                "target_dtype",
            )
        layout = {"kind": "huggingface", "dequantize": name, "block_size": block_size}
        self._set_up(path, thread_count, layout)
