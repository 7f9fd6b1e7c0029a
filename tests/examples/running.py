"""Running examples: in the pool's ranks, which are there already, or under torchrun as users do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLES", "call", "torchrun"]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def call(example: str, function: str, *args: Any, **others: Any) -> Any:
    """A function of an example, imported as its own script would be."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        module = importlib.import_module(example)
    finally:
        sys.path.remove(str(EXAMPLES))
    return getattr(module, function)(*args, **others)


def torchrun(ranks: int, example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What an example printed, and how it ended."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{example}.py"), *arguments],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
