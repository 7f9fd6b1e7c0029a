"""Commands that several ranks run together, under torchrun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["launched_ranks"]


@contextlib.contextmanager
def launched_ranks() -> Iterator[int]:
    """This process's rank; under torchrun the ranks find one another first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield 0
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
