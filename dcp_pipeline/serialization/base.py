"""How items become the bytes of a data file: the interface of a kind of serialization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dcp_pipeline.core.packing import Column
from dcp_pipeline.core.spans import SpansByRow
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.types.entries import Item

__all__ = ["FileImage", "Serialization"]


@dataclass(frozen=True)
class FileImage:
    """A data file before it is written: its size and where every item lies are known already.

    Attributes:
        size: bytes of the file.
        offset, length, payload: per item, as in a :class:`ChunkTable`.
        segments: the bytes, in order; each view is valid until the next is asked for.
        encoded: items of tensors whose bytes are not simply their elements, and how they are
            stored; places are those in the file.
    """

    size: int
    offset: Column
    length: Column
    payload: Column
    segments: Callable[[], Iterator[memoryview]]
    encoded: SpansByRow = field(default_factory=dict)


class Serialization(ABC):
    """A kind of serialization.

    Attributes:
        kind: its name in the config and in a manifest.
        extension: of data files.
        dcp_reads: whether plain DCP can read the items.
    """

    kind: ClassVar[str]
    extension: ClassVar[str]
    dcp_reads: ClassVar[bool]

    @abstractmethod
    def image(self, items: Sequence[Item]) -> FileImage:
        """Lay the items out in one file, tensors in the order given; values may go before them."""

    def check_name(self, name: str) -> None:
        """Look at the name of a key before anything is written.

        Raises:
            UnsupportedLeafError: it cannot be stored.
        """
        return None

    def within(self, nbytes: int) -> tuple[Serialization, int]:
        """The same with a bound on its own memory, for each file that is written at a time.

        Args:
            nbytes: for it and for the elements that are made for it.

        Returns:
            And what it leaves of them for the elements.
        """
        return self, nbytes

    def check_dtype(self, dtype_name: str) -> None:
        """Look at the dtype of a tensor, as torch names it, before anything is written.

        Raises:
            UnsupportedLeafError: it cannot be stored.
        """
        return None

    @abstractmethod
    def encode_value(self, value: Any) -> bytes:
        """The stored bytes of a Python value.

        Raises:
            UnsupportedLeafError: :meth:`decode_value` would refuse them.
        """

    @abstractmethod
    def decode_value(self, data: bytes) -> Any:
        """The value again.

        Raises:
            UnsafeCheckpointError: the bytes ask for code to be run.
            FormatError: they are damaged.
        """

    def encode_comparable(self, value: Any) -> tuple[bytes, int]:
        """The stored bytes, and a digest that is equal where values of two ranks are."""
        return self.encode_value(value), value_digest(value)
