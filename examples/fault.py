"""A file system on which one rank is killed in the middle of a write; `make demo` needs one.

It is also what a storage of your own looks like: a config with a ``kind``, and what it builds.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Literal

from omegaconf import DictConfig

from dcp_pipeline import PipelineConfig
from dcp_pipeline.config.compose import from_user
from dcp_pipeline.core.registry import register
from dcp_pipeline.storage.changes import FileChanges
from dcp_pipeline.storage.config import FileSystemConfig
from dcp_pipeline.storage.filesystem import FileSystemStorage

FATAL_BYTES = 1 << 20


class KillingFileSystemConfig(FileSystemConfig):
    """The file system, but one rank does not survive a save.

    Attributes:
        kill_rank: the rank that is killed.
        kill_in: the name of the checkpoint that it is killed in.
    """

    kind: Literal["killing_filesystem"] = "killing_filesystem"
    kill_rank: int
    kill_in: str

    def build(self) -> FileSystemStorage:
        settings = self.model_dump(exclude={"kind", "kill_rank", "kill_in"})
        is_killed = os.environ.get("RANK") == str(self.kill_rank)
        return FileSystemStorage(
            **settings, changes=KillingChanges(self.kill_in) if is_killed else None
        )


register("storage", "killing_filesystem", KillingFileSystemConfig)


def killed_in_a_save(checkpoint: DictConfig, rank: int, step: int) -> PipelineConfig:
    """The config, with ``rank`` killed in the middle of what it writes for ``step``."""
    config = from_user(checkpoint)
    settings = config.storage.model_dump(exclude={"kind"})
    storage = KillingFileSystemConfig(**settings, kill_rank=rank, kill_in=f"step-{step}")
    return config.model_copy(update={"storage": storage})


class KillingChanges(FileChanges):
    """Kills its process once a file of one directory has its first MiB.

    Args:
        directory: the last part of the directory's path.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._paths: dict[int, str] = {}

    def create(self, path: str, flags: int = 0) -> int:
        descriptor = super().create(path, flags)
        if os.path.basename(os.path.dirname(path)) == self._directory:
            self._paths[descriptor] = path
        return descriptor

    def close(self, descriptor: int) -> None:
        self._paths.pop(descriptor, None)
        super().close(descriptor)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        (data,) = buffers
        if descriptor not in self._paths or offset + len(data) <= FATAL_BYTES:
            return super().write(descriptor, buffers, offset)
        super().write(descriptor, [data[: FATAL_BYTES - offset]], offset)
        name = os.path.basename(self._paths[descriptor])
        print(f"SIGKILL after {FATAL_BYTES} bytes of {name}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0
