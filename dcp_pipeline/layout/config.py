"""Configs of the layouts, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from dcp_pipeline.core.kind import Bytes, KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.layout.dcp import DcpLayout
    from dcp_pipeline.layout.huggingface import HuggingFaceLayout

__all__ = ["DcpLayoutConfig", "HuggingFaceLayoutConfig"]

_SMALLEST_BLOCK, _LARGEST_BLOCK = 4 * 1024, 16 * 1024**2


def _block(size: int) -> int:
    is_power_of_two = size & (size - 1) == 0
    if not is_power_of_two or not _SMALLEST_BLOCK <= size <= _LARGEST_BLOCK:
        raise ValueError("expected a power of two from 4KiB to 16MiB")
    return size


class DcpLayoutConfig(KindConfig):
    """A directory with the files of ``torch.distributed.checkpoint``, and our manifest beside them.

    Attributes:
        metadata: write ``.metadata``, with which plain DCP opens the checkpoint. With safetensors
            it is never written, since DCP cannot read such files.
        checksum: what the blocks of the data files are hashed with.
        block_bytes: how much data one checksum covers; a read verifies whole blocks.
        on_foreign_overwrite: what to believe when plain DCP has saved into a checkpoint of ours:
            ``error`` refuses to open it, ``manifest`` opens our save, ``metadata`` opens DCP's.
            ``metadata`` also opens a checkpoint of ours that has lost its manifest, unverified.
    """

    kind: Literal["dcp"] = "dcp"
    metadata: bool = True
    checksum: Literal["xxh3_64", "crc32", "sha256"] = "xxh3_64"
    block_bytes: Annotated[Bytes, AfterValidator(_block)] = 64 * 1024
    on_foreign_overwrite: Literal["error", "manifest", "metadata"] = "error"

    def build(self) -> DcpLayout:
        """Make the layout."""
        from dcp_pipeline.layout.dcp import DcpLayout

        return DcpLayout(
            metadata=self.metadata,
            checksum=self.checksum,
            block_bytes=self.block_bytes,
            on_foreign_overwrite=self.on_foreign_overwrite,
        )


class HuggingFaceLayoutConfig(KindConfig):
    """A repository of Hugging Face: safetensors, whole or in shards, or ``pytorch_model.bin``.

    Attributes:
        dequantize: dtype in which float8 in blocks (``*.weight`` and ``*.weight_scale_inv``) and
            MXFP4 (``*_blocks`` and ``*_scales``) are read, under the key of the codes; ``none``
            leaves codes and scales as they are.
        block_size: rows and columns of float8 that share a scale; ``null`` for what ``config.json``
            says, or 128.
    """

    kind: Literal["huggingface"] = "huggingface"
    dequantize: Literal["none", "bfloat16", "float16", "float32"] = "none"
    block_size: int | None = Field(default=None, ge=1, lt=1 << 31)

    def build(self) -> HuggingFaceLayout:
        """Make the layout."""
        from dcp_pipeline.layout.huggingface import HuggingFaceLayout

        return HuggingFaceLayout(dequantize=self.dequantize, block_size=self.block_size)
