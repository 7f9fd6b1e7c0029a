"""A base for tensor-like types of a user's own that are saved in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from dcp_pipeline.types.dcp import ChunkStorageMetadata, MetadataIndex

__all__ = ["CheckpointableTensor"]


class CheckpointableTensor(ABC):
    """A tensor of which this process holds some boxes.

    It is saved and loaded like any sharded tensor. What is loaded is copied into the tensors that
    :meth:`__get_tensor_shard__` gives, so these have to be the memory itself. The two methods are
    those of DCP's own protocol (``torch.distributed._checkpointable``); its planners, unlike ours,
    follow it for subclasses of ``torch.Tensor`` only.

    Example:
        >>> class Halves(CheckpointableTensor):
        ...     shape, dtype = (4,), torch.float32
        ...     def __init__(self, value: float) -> None:
        ...         self.parts = [torch.full((2,), value), torch.full((2,), -value)]
        ...     def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        ...         size = torch.Size([2])
        ...         return [ChunkStorageMetadata(torch.Size([at]), size) for at in (0, 2)]
        ...     def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        ...         return self.parts[index.offset[0] // 2]
        >>> [chunk.offsets[0] for chunk in Halves(1.0).__create_chunk_list__()]
        [0, 2]
    """

    @property
    @abstractmethod
    def shape(self) -> Sequence[int]:
        """Of the whole tensor, over all processes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    @property
    def device(self) -> torch.device:
        """Where the parts lie."""
        return torch.device("cpu")

    @abstractmethod
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The boxes that this process holds; others may hold the same."""

    @abstractmethod
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of one box, of its sizes.

        Args:
            index: its ``offset`` is that of the box, its ``index`` the place in the list.
        """
