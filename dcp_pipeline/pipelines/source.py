"""A checkpoint that is read box by box, in any order, by the threads that write another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType

import numpy as np
import torch

from dcp_pipeline.core.affine import Mapped
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipelines.steps.data_files import DataFiles
from dcp_pipeline.pipelines.steps.read_boxes import CastCounts
from dcp_pipeline.pipelines.steps.read_items import Located, locate_rows
from dcp_pipeline.pipelines.steps.read_mapped import Constant, mapped_reads
from dcp_pipeline.state.targets import TensorTarget
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.reading import Read
from dcp_pipeline.types.entries import Piece

__all__ = ["SourceReader"]


class SourceReader:
    """The tensors that rules make of a checkpoint, and its values.

    Args:
        directory, manifest: the checkpoint.
        tensors: what rules have made of it; see :class:`~dcp_pipeline.rules.mapping.Outcome`.
        check: called between two steps; may raise to stop.

    Attributes:
        casts: how many elements did not fit their new dtype, by key.
        bytes_read: from storage, so far.
    """

    def __init__(
        self,
        directory: Directory,
        manifest: Manifest,
        tensors: Mapping[str, Mapped | None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest, self._tensors = manifest, tensors
        # Whoever writes has threads enough.
        self._files = DataFiles(manifest, directory, 1, check)
        self._numbers = {name: key for key, name in enumerate(manifest.names)}
        self._lock = threading.Lock()
        self._located: Located | None = None
        self._starts = np.zeros(0, np.int64)
        self.casts: dict[str, int] = {}
        self.bytes_read = 0

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def _places(self) -> Located:
        with self._lock:
            if self._located is None:
                rows = range(len(self._manifest.table))
                located = locate_rows(self._manifest, rows, self._files.source)
                count = len(located.table.keys)
                self._starts = np.searchsorted(located.table.key, np.arange(count + 1))
                self._located = located
        return self._located

    def fill(self, name: str, offsets: tuple[int, ...], memory: torch.Tensor) -> None:
        """Read the box of a tensor that starts at ``offsets`` and has the memory's shape.

        Raises:
            CorruptCheckpointError: the data are not as they were written.
        """
        mapped = self._tensors[name]
        assert mapped is not None
        located = self._places()
        target = TensorTarget(
            name,
            -1,
            mapped.dtype,
            (Piece(offsets, tuple(memory.shape), memory),),
            path=(),
            target_dtype=None,
            mapped=mapped,
        )
        casts, constants = CastCounts(), list[Constant]()
        reads: dict[int, list[Read]] = {}
        for file, read in mapped_reads(
            located, self._starts, self._numbers, target, casts, constants
        ):
            reads.setdefault(file, []).append(read)
        nbytes = self._files.run(reads)
        for constant in constants:
            value = torch.tensor(constant.value, dtype=torch.float64, device="cpu")
            constant.view.copy_(value.to(constant.view.dtype).expand(constant.view.shape))
        with self._lock:
            self.bytes_read += nbytes
        self.note_casts(name, casts.count(target))

    def note_casts(self, name: str, lost: int) -> None:
        """Count elements of a tensor that did not fit their new dtype."""
        if lost:
            with self._lock:
                self.casts[name] = self.casts.get(name, 0) + lost

    def value(self, stored: str) -> bytes:
        """The stored bytes of a value, by its stored key."""
        key = self._numbers[stored]
        if key in self._manifest.inline:
            return self._manifest.inline[key]
        located = self._places()
        row = int(self._starts[key])
        table, found = located.table, list[bytes]()
        offset = int(table.offset[row] + table.payload[row])
        length = int(table.length[row] - table.payload[row])
        read = Read(offset, length, stored, deliver=lambda data: found.append(bytes(data)))
        self._files.run({int(table.file[row]): [read]})
        return b"".join(found)

    @property
    def is_verified(self) -> bool:
        """Whether all that was read so far was compared with a digest."""
        return self._files.is_verified
