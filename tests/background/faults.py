"""A file system that holds up, fails or ends the process when the first data file is made.

It works in a background process too: what it does is in its config, and it counts in files.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from dcp_pipeline.core.registry import register
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.config import FileSystemConfig
from dcp_pipeline.storage.filesystem import FileSystemStorage


class TroubledConfig(FileSystemConfig):
    """Trouble for every data file that is made.

    Attributes:
        gate: a path; data files are only made once it exists.
        count_in: a directory in which a file is made for each fault so far.
        times: how many faults there are in all.
        exit_code: what the process ends with, ``None`` to raise ``code`` instead.
        on_rank: where the faults are, ``None`` for everywhere.
    """

    kind: Literal["troubled"] = "troubled"  # type: ignore[assignment]
    gate: str | None = None
    count_in: str = ""
    times: int = 0
    exit_code: int | None = None
    code: int = errno.ENOSPC
    on_rank: int | None = None

    def build(self) -> FileSystemStorage:
        return FileSystemStorage(thread_count=1, changes=TroubledChanges(self))


class TroubledChanges(FileChanges):
    def __init__(self, config: TroubledConfig) -> None:
        super().__init__()
        self._config = config

    def create(self, path: str, flags: int = 0) -> int:
        if path.endswith((".distcp", ".safetensors")):
            self._make_trouble()
        return super().create(path, flags)

    def _make_trouble(self) -> None:
        config = self._config
        deadline = time.monotonic() + 60
        while config.gate is not None and not os.path.exists(config.gate):
            assert time.monotonic() < deadline, "the gate was never opened"
            time.sleep(0.01)
        rank = dist.get_rank() if dist.is_initialized() else 0
        if config.on_rank not in (None, rank) or not config.times:
            return
        counted = Path(config.count_in) / f"rank{rank}"
        counted.mkdir(parents=True, exist_ok=True)
        number = len(list(counted.iterdir()))
        if number < config.times:
            (counted / str(number)).touch()
            if config.exit_code is not None:
                os._exit(config.exit_code)
            raise OSError(config.code, os.strerror(config.code))


def register_troubled() -> None:
    """Make the kind known in this process; a background process gets it with its config."""
    register("storage", "troubled", TroubledConfig)
