"""Host memory that snapshots are kept in: plain, pinned, or shared with another process."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import tempfile
from abc import ABC, abstractmethod
from typing import Any

import torch

__all__ = ["Buffer", "HostMemory", "Memory", "PinnedMemory", "SharedMemory"]

logger = logging.getLogger("dcp_pipeline")


class Buffer:
    """A run of bytes in host memory.

    Attributes:
        data: uint8 tensor ``[nbytes]`` over it.
        descriptor: of the file behind it, which another process can map; -1 where there is none.
        number: tells it from every other one of this process.
    """

    _numbers = itertools.count()

    def __init__(self, data: torch.Tensor, descriptor: int = -1) -> None:
        self.number = next(self._numbers)
        self.data = data
        self.descriptor = descriptor


class Memory(ABC):
    """A kind of host memory."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of that many bytes, at least one."""

    def free(self, buffer: Buffer) -> None:
        """Give a buffer back; nothing uses it afterwards."""
        buffer.data = _nothing()


class HostMemory(Memory):
    """Ordinary memory of this process."""

    def allocate(self, nbytes: int) -> Buffer:
        return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


class PinnedMemory(Memory):
    """Page-locked memory, to which a device copies while the processor does something else.

    Without a device it is ordinary memory: there is nothing to copy from.
    """

    def allocate(self, nbytes: int) -> Buffer:
        if not torch.accelerator.is_available():
            return HostMemory().allocate(nbytes)
        return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))


class SharedMemory(Memory):
    """Memory behind a file without a name, so that nothing is left of it when its users are gone.

    One descriptor stands for all tensors of a snapshot, however many they are. It is page-locked
    too where there is a CUDA device.
    """

    def allocate(self, nbytes: int) -> Buffer:
        descriptor = _nameless_file()
        try:
            os.ftruncate(descriptor, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        data = torch.frombuffer(mapping, dtype=torch.uint8)
        _lock_pages(data)
        return Buffer(data, descriptor)

    def free(self, buffer: Buffer) -> None:
        _unlock_pages(buffer.data)
        # The mapping goes with the last tensor over it.
        buffer.data = _nothing()
        descriptor, buffer.descriptor = buffer.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dcp_pipeline snapshot", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _lock_pages(data: torch.Tensor) -> None:
    if torch.cuda.is_available():
        runtime: Any = torch.cuda
        code = runtime.cudart().cudaHostRegister(data.data_ptr(), data.numel(), 0)
        if int(code) != 0:
            logger.warning("shared memory could not be page-locked (CUDA error %d)", int(code))


def _unlock_pages(data: torch.Tensor) -> None:
    if data.numel() and torch.cuda.is_available():
        runtime: Any = torch.cuda
        with contextlib.suppress(RuntimeError):
            runtime.cudart().cudaHostUnregister(data.data_ptr())
