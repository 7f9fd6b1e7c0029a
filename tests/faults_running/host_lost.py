"""The process that hosts the store ends or stops before the ranks have found one another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from dcp_pipeline.core.errors import CoordinationError
from tests.crash.forks import fork
from tests.faults_running.jobs import pipeline_of, state_of
from tests.faults_running.lost import free_port

__all__ = ["lose_host"]

WORLD = 3
TIMEOUT = 4.0
SPARE = 8.0
"""For a machine that is busy."""


def lose_host(root: str, how: str) -> list[str]:
    """Rank 0 goes before its first save; what the others say that they should not."""
    port = free_port()
    ranks = [fork(_act(Path(root), rank, port, how)) for rank in range(WORLD)]
    ends = {rank: ranks[rank].wait(60) for rank in range(1, WORLD)}
    os.kill(ranks[0].pid, signal.SIGKILL)
    ranks[0].wait(10)
    return [
        f"rank {rank}: {problem}"
        for rank, end in ends.items()
        for problem in (end.value if end.how == "ok" else [f"{end.error} {end.trace}"])
    ]


def _act(root: Path, rank: int, port: int, how: str) -> Callable[[], list[str]]:
    def act() -> list[str]:
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, limit, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        # The others see that rank 0 is gone, and not only that it is late.
        time.sleep(0.3)
        started = time.monotonic()
        with pipeline_of(timeout=TIMEOUT) as pipeline:
            try:
                pipeline.save(state_of(1), root / "checkpoint")
            except CoordinationError as error:
                return _problems(str(error), time.monotonic() - started)
        return ["it did not raise"]

    return act


def _problems(said: str, seconds: float) -> list[str]:
    problems = [f"it took {seconds:.1f} s"] if seconds > TIMEOUT + SPARE else []
    return problems if "rank 0" in said else [*problems, f"it says: {said}"]
