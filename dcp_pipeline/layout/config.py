"""Configs of the layouts, torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from dcp_pipeline.core.kind import Bytes, KindConfig

if TYPE_CHECKING:
    from dcp_pipeline.layout.dcp import DcpLayout
    from dcp_pipeline.layout.huggingface import HuggingFaceLayout
    from dcp_pipeline.layout.mega import MegaLayout

__all__ = ["DcpLayoutConfig", "HuggingFaceLayoutConfig", "MegaLayoutConfig"]

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
        max_shard_size: bytes that a written file holds at most, but for one larger tensor.
        fqn_to_index_mapping: the number of the file, from 1 on, that each key is written to.
        tied: a tensor that shares another's memory is left out (``drop``), and named in the
            metadata for our own loads, or written again (``write``).
        assets: directory that ``config.json``, ``generation_config.json`` and the tokenizer's files
            are copied from.
    """

    works_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"serialization": ("safetensors",)}
    kind: Literal["huggingface"] = "huggingface"
    dequantize: Literal["none", "bfloat16", "float16", "float32"] = "none"
    block_size: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_shard_size: Bytes = 5 * 10**9
    fqn_to_index_mapping: dict[str, Annotated[int, Field(ge=1, lt=100_000)]] | None = None
    tied: Literal["drop", "write"] = "drop"
    assets: str | None = None

    def build(self) -> HuggingFaceLayout:
        """Make the layout."""
        from dcp_pipeline.layout.huggingface import HuggingFaceLayout

        return HuggingFaceLayout(
            dequantize=self.dequantize,
            block_size=self.block_size,
            max_shard_bytes=self.max_shard_size,
            file_of=self.fqn_to_index_mapping,
            tied=self.tied,
            assets=self.assets,
        )


class MegaLayoutConfig(KindConfig):
    """A repository of MEGA files: ``model.mega``, or shards and ``model.mega.index.json``.

    Attributes:
        verify: compare what is read with the checksums of the format, where there are any; a part
            of a tensor is then read with all that its checksum covers.
        tied: leave out tensors that share another's memory (``drop``; loads of this package give
            them back, other readers lack them) or ``write`` them again.
    """

    works_with: ClassVar[Mapping[str, tuple[str, ...]]] = {"serialization": ("mega",)}
    kind: Literal["mega"] = "mega"
    verify: bool = True
    tied: Literal["drop", "write"] = "drop"

    def build(self) -> MegaLayout:
        """Make the layout."""
        from dcp_pipeline.layout.mega import MegaLayout

        return MegaLayout(verify=self.verify, tied=self.tied)
