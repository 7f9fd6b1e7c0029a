"""Loads in which reading fails on one rank."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_pipeline.core.errors import RollbackFailedError, StorageError
from dcp_pipeline.storage.base import Source
from dcp_pipeline.storage.file_directory import FileSystemDirectory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.equal import assert_same
from tests.faults_running.jobs import my_rank, pipeline_of, several_files

__all__ = ["HOW", "FaultyReads", "failing_loads", "save_rich"]

HOW = ("EIO", "ESTALE", "ENOENT", "vanishes", "truncated")


class FaultyReads(FileSystemStorage):
    """Reads that fail from one on.

    Args:
        how: an errno's name; ``vanishes``: the file is gone when it is opened; ``truncated``: it is
            cut off once it is open.
        number: of the first read, or for ``vanishes`` of the first opening, that fails.
    """

    def __init__(self, how: str, number: int) -> None:
        super().__init__(thread_count=2, buffer_bytes=32 << 10)
        self.how = how
        self.left = number

    def is_due(self) -> bool:
        self.left -= 1
        return self.left < 0

    def open(self, checkpoint_id: str) -> FileSystemDirectory:
        return _Directory(self, super().open(checkpoint_id).location)


class _Directory(FileSystemDirectory):
    def __init__(self, storage: FaultyReads, path: str) -> None:
        super().__init__(storage, path)
        self._faults = storage

    def open(self, name: str) -> Source:
        if self._faults.how == "vanishes" and self._faults.is_due():
            return super().open(name + ".gone")
        source = super().open(name)
        if self._faults.how != "vanishes":
            source.read_into = self._failing(source)  # type: ignore[method-assign]
        return source

    def _failing(self, source: Source) -> Any:
        real = source.read_into

        def read_into(offset: int, target: memoryview) -> None:
            if not self._faults.is_due():
                return real(offset, target)
            if self._faults.how == "truncated":
                return real(source.size - 1, target)
            code = getattr(errno, self._faults.how)
            path = os.path.join(self.location, source.name)
            raise StorageError(f"{path}: {os.strerror(code)}", path, code)

        return read_into


class Counter:
    """A ``Stateful``."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.tensor = torch.full((5,), value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor, "list": [self.value]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def rich_state(value: float, rank: int | None = None) -> dict[str, Any]:
    """Tensors that all ranks read, some of a rank's own, containers and an object."""
    return {
        "shared": {f"w{place}": torch.full((70, 60 + place), value) for place in range(4)},
        f"of{my_rank() if rank is None else rank}": torch.full((90, 40), value),
        "list": [torch.full((3,), value), value],
        "pair": (torch.full((3,), value), "text"),
        "empty": {},
        "object": Counter(value),
    }


def plain(value: Any) -> Any:
    """What is compared: objects as their values, tensors as copies."""
    if isinstance(value, Counter):
        return {"value": value.value, "tensor": value.tensor.clone()}
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def save_rich(path: Path) -> None:
    with several_files(), pipeline_of() as pipeline:
        pipeline.save(rich_state(1.0), path)


def failing_loads(path: Path, rank: int, how: str, config: dict[str, Any]) -> list[str]:
    """Fail a load at every read of one rank in turn; what was wrong, and how many failed."""
    problems: list[str] = []
    number = 0
    while True:
        storage = FaultyReads(how, number) if my_rank() == rank else None
        state = rich_state(-1.0)
        before = plain(state)
        error: Exception | None = None
        with pipeline_of(None, config, storage=storage) as pipeline:
            try:
                pipeline.load(state, path)
            except Exception as raised:
                error = raised
        ends: list[Any] = [None] * dist.get_world_size()
        mine = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(ends, mine)
        if ends.count(ends[0]) != len(ends):
            problems.append(f"{number}: the ranks raise {ends}")
        if error is None:
            assert_same(plain(state), plain(rich_state(1.0)))
            return problems if number else [*problems, "nothing has failed"]
        # What fails at the second reading cannot be undone without a copy, and is said to be so.
        is_torn = isinstance(error, RollbackFailedError) and config["rollback"] == "verify_first"
        problems += [f"{number}: {problem}" for problem in _wrong(error, rank, how, is_torn)]
        if not is_torn:
            assert_same(plain(state), before)
        number += 1


def _wrong(error: Exception, rank: int, how: str, is_torn: bool) -> list[str]:
    text = str(error)
    problems = [] if f"rank {rank}" in text and ".distcp" in text else [text]
    if how != "truncated" and not is_torn:
        code = getattr(errno, how, errno.ENOENT)
        if not isinstance(error, OSError) or error.errno != code:
            problems.append(f"{type(error).__mro__}: {text}")
    return problems
