"""Safetensors as DCP's writer leaves them for its Hugging Face reader: boxes under their keys.

Where in its tensor a box lies is said in the file's metadata: ``DCP_SHARDING_INFO`` is JSON,
``{key: {"saved_offsets": [...]}}`` (``torch.distributed.checkpoint._hf_utils``, from torch 2.8 on).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from dcp_pipeline.formats.safetensors import TensorEntry, encode_header
from dcp_pipeline.serialization.base import FileImage
from dcp_pipeline.serialization.safetensors import SafetensorsSerialization
from dcp_pipeline.types.entries import Item
from dcp_pipeline.types.memory import segments_of

__all__ = ["ShardSerialization"]

_DCP_VERSION = "1.0"


class ShardSerialization(SafetensorsSerialization):
    """A file of boxes, of each key one; there are no values."""

    def image(self, items: Sequence[Item]) -> FileImage:
        tensors = [item.data for item in items if not isinstance(item.data, bytes)]
        length = np.asarray([data.numel() * data.element_size() for data in tensors], np.int64)
        entries = [
            TensorEntry(item.name, str(item.dtype), item.sizes, nbytes)
            for item, nbytes in zip(items, length.tolist(), strict=True)
        ]
        places = {item.name: {"saved_offsets": list(item.offsets)} for item in items}
        metadata = {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps(places),
            "DCP_VERSION": _DCP_VERSION,
        }
        header, starts = encode_header(entries, metadata)

        def segments() -> Iterator[memoryview]:
            yield memoryview(header)
            for tensor in tensors:
                yield from segments_of(tensor)

        return FileImage(
            len(header) + int(length.sum()),
            np.asarray(starts, np.int64),
            length,
            np.zeros_like(length),
            segments,
        )
