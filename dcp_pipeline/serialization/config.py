"""Configs of the serializations, torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from dcp_pipeline.core.kind import Bytes, KindConfig, Names

if TYPE_CHECKING:
    from dcp_pipeline.serialization.mega import MegaSerialization
    from dcp_pipeline.serialization.safetensors import SafetensorsSerialization
    from dcp_pipeline.serialization.torch_save import TorchSaveSerialization

__all__ = ["MegaConfig", "SafetensorsConfig", "TorchSaveConfig"]

_LARGEST_ALIGNMENT = 1 << 20
_SMALLEST_CHUNK = 64 << 10


def _dotted(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        parts = name.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise ValueError(f"{name!r} is no dotted name such as 'my_package.Thing'")
    return names


class TorchSaveConfig(KindConfig):
    """Items in ``torch.save``'s format, which plain DCP reads too.

    Attributes:
        trusted: lift the guard of ``weights_only=True``. Loading can then run any code that the
            file names: only for files whose writer you trust as you trust your own program.
        safe_globals: dotted names of classes that byte items may hold beside torch's own.
    """

    kind: Literal["torch_save"] = "torch_save"
    trusted: bool = False
    safe_globals: Annotated[Names, AfterValidator(_dotted)] = ()

    def build(self) -> TorchSaveSerialization:
        """Make the serialization."""
        from dcp_pipeline.serialization.torch_save import TorchSaveSerialization

        return TorchSaveSerialization(trusted=self.trusted, safe_globals=self.safe_globals)


class SafetensorsConfig(KindConfig):
    """Every data file is a safetensors file, and nothing is pickled anywhere."""

    kind: Literal["safetensors"] = "safetensors"

    def build(self) -> SafetensorsSerialization:
        """Make the serialization."""
        from dcp_pipeline.serialization.safetensors import SafetensorsSerialization

        return SafetensorsSerialization()


def _aligned(nbytes: int) -> int:
    if nbytes & (nbytes - 1) or nbytes > _LARGEST_ALIGNMENT:
        raise ValueError("expected a power of two up to 1MiB")
    return nbytes


class MegaConfig(KindConfig):
    """Every data file is a MEGA file, and nothing is pickled anywhere.

    Attributes:
        checksum: of the format itself, beside the digests of the layout: other readers of MEGA
            find it in the file.
        chunk_bytes: tensors with more bytes are cut into chunks, each with a checksum of its own.
        alignment: the elements begin at a multiple of it in the file, bytes.
        compression: ``zstd`` compresses each chunk by itself, where that makes it smaller.
        level: of zstd, from fast to small.
        shuffle: group the bytes of a chunk by their place in their element before it is compressed.
    """

    kind: Literal["mega"] = "mega"
    checksum: Literal["none", "crc32", "sha256"] = "crc32"
    chunk_bytes: Annotated[Bytes, Field(ge=_SMALLEST_CHUNK)] = 16 << 20
    alignment: Annotated[Bytes, AfterValidator(_aligned)] = 4096
    compression: Literal["none", "zstd"] = "none"
    level: Annotated[int, Field(ge=1, le=22)] = 3
    shuffle: bool = False

    def build(self) -> MegaSerialization:
        """Make the serialization."""
        from dcp_pipeline.serialization.mega import MegaSerialization

        return MegaSerialization(
            self.checksum,
            self.chunk_bytes,
            self.alignment,
            self.compression,
            self.level,
            self.shuffle,
        )
