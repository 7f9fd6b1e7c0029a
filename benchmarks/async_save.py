"""What asynchronous saves cost the training, beside plain DCP's modes and a bare copy.

    python -m benchmarks.async_save [--runs 5] [--quick] [--only 300|20,000] [--output FILE]

*blocked* is what the call takes, from the second save on; the bare copy is ``copy_`` of each tensor
into memory that was touched before. *to commit* is until the future is done. *first* is the whole
first call in a fresh pipeline, for ours after ``warm_up``. *training* is how many times slower a
loop of small matrix products runs while the background saves.
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.common import llama_like, many_small, total, workplace
from dcp_pipeline import Pipeline

State = dict[str, torch.Tensor]
Start = Callable[[State, Path], Any]


@dataclass
class Mode:
    """One contender.

    Attributes:
        name: in the table.
        make: makes what ``start`` needs; the time of the first save is measured behind it.
        close: gives it back.
        blocked, committed: seconds of each run.
        slowed: training's slow-down of each run.
        first: seconds of the first call.
    """

    name: str
    make: Callable[[State], tuple[Start, Callable[[], None]]]
    blocked: list[float] = field(default_factory=list)
    committed: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)
    first: float = 0.0


def ours(background: str) -> Callable[[State], tuple[Start, Callable[[], None]]]:
    def make(state: State) -> tuple[Start, Callable[[], None]]:
        pipeline = Pipeline.from_config({"background": background})
        pipeline.warm_up(state, no_dist=True)
        return lambda s, path: pipeline.async_save(s, path, no_dist=True), pipeline.close

    return make


def theirs(
    kind: AsyncCheckpointerType, options: StagingOptions | None
) -> Callable[[State], tuple[Start, Callable[[], None]]]:
    def make(state: State) -> tuple[Start, Callable[[], None]]:
        stager = None if options is None else DefaultStager(options)

        def start(s: State, path: Path) -> Any:
            return dcp.async_save(
                s, checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager
            )

        return start, (lambda: None) if stager is None else stager.close

    return make


THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
PLAIN = StagingOptions(False, False, False, False)
SHARED = StagingOptions(False, True, False, False)


def modes() -> list[Mode]:
    return [
        Mode("dcp_pipeline, thread", ours("thread")),
        Mode("dcp_pipeline, process", ours("process")),
        Mode("DCP, thread", theirs(THREAD, None)),
        Mode("DCP, thread, kept stager", theirs(THREAD, PLAIN)),
        Mode("DCP, process", theirs(PROCESS, None)),
        Mode("DCP, process, kept stager", theirs(PROCESS, SHARED)),
    ]


def train_step(matrix: torch.Tensor) -> float:
    """Seconds of a step of some milliseconds, with Python in between as in a real loop."""
    started = time.perf_counter()
    for _ in range(20):
        matrix = torch.tanh(matrix @ matrix)
    return time.perf_counter() - started


def pace(matrix: torch.Tensor, until: Callable[[], bool], least: int = 10) -> float:
    """Median seconds of steps, until ``until`` and at least some."""
    steps: list[float] = []
    while len(steps) < least or not until():
        steps.append(train_step(matrix))
    return statistics.median(steps)


def one_save(mode: Mode, start: Start, state: State, path: Path, counted: bool) -> None:
    matrix = torch.randn(192, 192)
    alone = pace(matrix, lambda: True, least=30)
    began = time.perf_counter()
    saving = start(state, path)
    blocked = time.perf_counter() - began
    beside = pace(matrix, saving.done)
    saving.result()
    committed = time.perf_counter() - began
    if counted:
        mode.blocked.append(blocked)
        mode.committed.append(committed)
        mode.slowed.append(beside / alone)


def bare_copies(state: State, targets: State, runs: int) -> list[float]:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        for name, tensor in state.items():
            targets[name].copy_(tensor)
        seconds.append(time.perf_counter() - began)
    return seconds


def measure(name: str, state: State, root: Path, runs: int, console: Console) -> None:
    console.print(f"\n{name}, {total(state) / 1e9:.2f} GB")
    targets = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    bare_copies(state, targets, 1)
    contenders, open_modes = modes(), []
    for mode in contenders:
        start, close = mode.make(state)
        try:
            began = time.perf_counter()
            start(state, root / "first").result()
            mode.first = time.perf_counter() - began
            open_modes.append((mode, start, close))
        except Exception as error:
            # What it opened stays with it; the others shall not run into the same limit.
            close()
            gc.collect()
            console.print(f"{mode.name} fails: {str(error).splitlines()[0][:100]}")
        shutil.rmtree(root / "first", ignore_errors=True)
    copies: list[float] = []
    for run in range(runs + 1):
        copies += bare_copies(state, targets, 1)
        for mode, start, _ in open_modes:
            one_save(mode, start, state, root / "next", counted=run > 0)
            shutil.rmtree(root / "next", ignore_errors=True)
    for *_, close in open_modes:
        close()
    copy = statistics.median(copies[1:])
    table = Table(title=f"{name}: bare copy {copy:.3f} s ({min(copies):.3f}-{max(copies):.3f})")
    for column in (
        "mode",
        "blocked s",
        "x bare copy",
        "to commit s",
        "first s",
        "training x slower",
    ):
        table.add_column(column)
    for mode, *_ in open_modes:
        blocked = statistics.median(mode.blocked)
        table.add_row(
            mode.name,
            f"{blocked:.3f} ({min(mode.blocked):.3f}-{max(mode.blocked):.3f})",
            f"{blocked / copy:.2f}",
            f"{statistics.median(mode.committed):.2f}",
            f"{mode.first:.2f}",
            f"{statistics.median(mode.slowed):.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the small tensors")
    parser.add_argument("--only", choices=["300", "20,000"], help="one of the two states")
    parser.add_argument("--directory", help="where to write, instead of the temporary directory")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    # DCP's stager for its process mode takes a file descriptor per tensor.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    store = dist.TCPStore("localhost", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    console = Console(width=130)
    with workplace(options.directory) as root:
        if options.only != "20,000":
            measure("300 tensors", llama_like(), root, options.runs, console)
        if options.only != "300":
            small = many_small(2_000) if options.quick else many_small()
            measure(f"{len(small):,} tensors", small, root, options.runs, console)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
