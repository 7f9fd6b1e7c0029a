"""Each item as ``torch.save`` writes it: what plain DCP reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from dcp_pipeline.core.checksum import crc32
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.formats.torch_zip import check_readable, frame_tensor, read_value, write_value
from dcp_pipeline.serialization.base import FileImage, Serialization
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Item
from dcp_pipeline.types.memory import segments_of

__all__ = ["TorchSaveSerialization"]

_ALIGNMENT = 64
_CRC_STEP = 1 << 20


class TorchSaveSerialization(Serialization):
    """A zip per tensor box or value, one after another, each at a multiple of 64 bytes.

    Args:
        trusted: load values with the full unpickler. It can run code: only for files you made.
        safe_globals: dotted names of classes that a value may hold.
    """

    kind: ClassVar[str] = "torch_save"
    extension: ClassVar[str] = ".distcp"
    dcp_reads: ClassVar[bool] = True

    def __init__(self, trusted: bool = False, safe_globals: Sequence[str] = ()) -> None:
        self._trusted = trusted
        self._safe_globals = [_resolve(name) for name in safe_globals]

    def encode_value(self, value: Any) -> bytes:
        if self._trusted:
            return write_value(value)
        return check_readable(value, self._safe_globals)

    def decode_value(self, data: bytes) -> Any:
        return read_value(data, safe_globals=self._safe_globals, trusted=self._trusted)

    def image(self, items: Sequence[Item]) -> FileImage:
        frames = [
            None if item.dtype is None else frame_tensor(DTYPES[item.dtype], item.sizes)
            for item in items
        ]
        length = np.asarray(
            [
                len(item.data)
                if frame is None
                else len(frame.head) + frame.payload_bytes + frame.tail_bytes
                for item, frame in zip(items, frames, strict=True)
            ],
            np.int64,
        )
        payload = np.asarray(
            [0 if frame is None else len(frame.head) for frame in frames], np.int64
        )
        padded = -(-length // _ALIGNMENT) * _ALIGNMENT
        offset = np.cumsum(padded) - padded
        size = int(offset[-1] + length[-1]) if len(items) else 0

        def segments() -> Iterator[memoryview]:
            for position, (item, frame) in enumerate(zip(items, frames, strict=True)):
                if isinstance(item.data, bytes):
                    yield memoryview(item.data)
                else:
                    assert frame is not None
                    yield memoryview(frame.head)
                    checksum = 0
                    for view in segments_of(item.data):
                        # Small steps: the bytes are still in the cache when they are written.
                        for start in range(0, len(view), _CRC_STEP):
                            step = view[start : start + _CRC_STEP]
                            checksum = crc32(step, checksum)
                            yield step
                    yield memoryview(frame.tail(checksum))
                if position + 1 < len(items):
                    yield memoryview(bytes(int(padded[position] - length[position])))

        return FileImage(size, offset, length, payload, segments)


def _resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"safe_globals names {name!r}, which cannot be imported: {error}",
            "serialization.safe_globals",
        ) from error
