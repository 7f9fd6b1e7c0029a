"""What the benchmarks share: states, contenders in turn, medians with their spread."""

from __future__ import annotations

import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

__all__ = [
    "Measurement",
    "Result",
    "interleaved",
    "llama_like",
    "many_small",
    "report",
    "workplace",
]


@dataclass
class Measurement:
    """Seconds of one contender, run after run."""

    name: str
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Result:
    """One row of a table: the same work by every contender, interleaved.

    Attributes:
        work: what was done.
        nbytes: of the state.
        baseline: the contender that ratios are against.
    """

    work: str
    nbytes: int
    baseline: str
    measurements: list[Measurement]

    def ratio(self, measurement: Measurement) -> tuple[float, float, float]:
        """How many times faster than the baseline: minimum, median and maximum, run by run."""
        base = next(m for m in self.measurements if m.name == self.baseline)
        ratios = [b / s for b, s in zip(base.seconds, measurement.seconds, strict=True)]
        return min(ratios), statistics.median(ratios), max(ratios)


def llama_like(scale: int = 1) -> dict[str, torch.Tensor]:
    """300 bfloat16 tensors shaped as a small llama's, about 0.57 GB at scale 1."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1024, 1024)] * 128 + [(2816, 512)] * 96 + [(1024,)] * 74 + [(32000, 1024)] * 2
    return {
        f"model.layers.{i}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for i, shape in enumerate(shapes * scale)
    }


def many_small(count: int = 20_000, elements: int = 13_500) -> dict[str, torch.Tensor]:
    """Many bfloat16 tensors, about 0.54 GB by default."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(count * elements, generator=generator).to(torch.bfloat16)
    return {f"experts.{i}.weight": part.clone() for i, part in enumerate(flat.split(elements))}


def total(state: dict[str, torch.Tensor]) -> int:
    """Bytes of a state."""
    return sum(value.nbytes for value in state.values())


@contextmanager
def workplace(root: str | None = None) -> Iterator[Path]:
    """A directory on disk that is removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="dcp-pipeline-bench-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def interleaved(
    contenders: dict[str, Callable[[], object]],
    runs: int,
    between: Callable[[], object] = lambda: None,
    warm_up: int = 1,
) -> list[Measurement]:
    """Run every contender in turn, ``runs`` times; the order changes from run to run."""
    measurements = {name: Measurement(name) for name in contenders}
    names = list(contenders)
    for number in range(runs + warm_up):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            between()
            gc.collect()
            started = time.perf_counter()
            contenders[name]()
            if number >= warm_up:
                measurements[name].seconds.append(time.perf_counter() - started)
    return list(measurements.values())


def drop_cache(path: Path) -> None:
    """Ask the kernel to forget the cached pages of all files below ``path``."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def report(title: str, results: list[Result], output: str | None = None) -> None:
    """Print a table, and write the figures as JSON if asked."""
    table = Table(title=title)
    for column in ("work", "contender", "median s", "min-max s", "GB/s", "x baseline (min-max)"):
        table.add_column(column)
    for result in results:
        for m in result.measurements:
            low, middle, high = result.ratio(m)
            table.add_row(
                result.work,
                m.name,
                f"{m.median:.3f}",
                f"{min(m.seconds):.3f}-{max(m.seconds):.3f}",
                f"{result.nbytes / m.median / 1e9:.2f}",
                f"{middle:.2f} ({low:.2f}-{high:.2f})",
            )
        table.add_section()
    Console(width=140).print(table)
    if output:
        machine = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "kernel": platform.release(),
        }
        figures = {"title": title, "machine": machine, "results": [asdict(r) for r in results]}
        Path(output).write_text(json.dumps(figures, indent=1))
