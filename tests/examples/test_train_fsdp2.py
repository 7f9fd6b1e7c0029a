"""The example under torchrun, with overrides of the checkpoint's config on its command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples.checks import losses_within, read_losses

ROOT = Path(__file__).resolve().parents[2]
OVERRIDES = ["checkpoint/serialization=safetensors", "checkpoint.storage.thread_count=4"]


def torchrun(folder: Path, ranks: int, *overrides: str) -> str:
    """Run the example in ``folder``; what it printed."""
    program = ["examples/train_fsdp2.py", *OVERRIDES]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *program, *overrides],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # `make demo` trains, saves and resumes too
def test_trains_saves_and_resumes_as_the_command_line_says(tmp_path: Path) -> None:
    # A copy, so that nobody edits the documents that it learns from while the test runs.
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    settings = ["train.root=run", "train.steps=3", "train.save_every=2", "model.width=96"]
    torchrun(tmp_path, 2, *settings, "train.losses=unbroken.jsonl")
    checkpoint = tmp_path / "run" / "step-2"
    assert {file.suffix for file in checkpoint.iterdir()} == {".safetensors", ".sums", ".json"}
    recorded = json.loads((checkpoint / "manifest.json").read_text())["config"]
    assert recorded["serialization"]["kind"] == "safetensors"
    assert recorded["storage"]["thread_count"] == 4

    torchrun(tmp_path, 2, *settings, "train.losses=resumed.jsonl")
    unbroken, resumed = (
        read_losses(tmp_path / f"{name}.jsonl") for name in ("unbroken", "resumed")
    )
    assert sorted(unbroken) == [1, 2, 3]
    check = losses_within("resumed", unbroken, resumed, [3])
    assert check.holds, check.found
