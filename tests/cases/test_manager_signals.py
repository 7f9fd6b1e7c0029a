"""Preemption of a job under torchrun: T81, and a signal that comes while a step is saved."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dcp_pipeline.manager import CheckpointManager
from tests.marks import slow

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from dcp_pipeline import CheckpointManager, Pipeline

class Slow:
    def state_dict(self):
        (folder / f"saving-{rank}").write_text(str(os.getpid()))
        time.sleep(float(sys.argv[3]))
        return {"value": 1}
    def load_state_dict(self, state):
        pass

def main():
    global folder, rank
    folder, every = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"w": torch.ones(100), f"of{rank}": torch.ones(10), "slow": Slow()}
    background = sys.argv[4]
    overrides = [f"background={background}"] if background else []
    with Pipeline.from_recipe("tiny_decoder", overrides) as pipeline:
        with CheckpointManager(folder / "run", pipeline, save_every_steps=every) as manager:
            for step in range(1, 600):
                if step > 2:
                    (folder / f"training-{rank}").write_text(str(os.getpid()))
                time.sleep(0.05)
                dist.all_reduce(torch.ones(1))
                is_last = manager.should_stop()
                if is_last or manager.should_save(step):
                    (manager.async_save if background else manager.save)(step, state)
                    print(f"rank {rank} saved {step};", flush=True)
                if is_last:
                    break
            else:
                sys.exit(3)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def start(folder: Path, every: int, seconds: float, background: str = "") -> subprocess.Popen[str]:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [sys.executable, *launcher, program, folder, str(every), str(seconds), background],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def pid_in(path: Path, job: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + 100
    while not path.exists() or not path.read_text():
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.02)
    return int(path.read_text())


def saved_by(output: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {0: [], 1: []}
    for rank, step in re.findall(r"rank (\d) saved (\d+);", output):
        found[int(rank)].append(int(step))
    return found


def test_t81_a_signal_to_one_rank_in_the_middle_of_a_step(tmp_path: Path) -> None:
    job = start(tmp_path, 1000, 0.0)
    pid = pid_in(tmp_path / "training-1", job)
    os.kill(pid, signal.SIGTERM)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    saved = saved_by(output)
    assert saved[0] == saved[1] and len(saved[0]) == 1
    assert "stopping: SIGTERM on rank 1" in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{saved[0][0]}"]


@pytest.mark.parametrize("background", [slow("thread"), slow("process")])
def test_t81_with_saves_in_the_background(tmp_path: Path, background: str) -> None:
    """Also the processes beside the rank get the signal, as where a scheduler sends it to all."""
    job = start(tmp_path, 2, 0.0, background)
    pid = pid_in(tmp_path / "training-1", job)
    while not (tmp_path / "run" / "step-2" / "manifest.json").exists():
        assert job.poll() is None
        time.sleep(0.02)
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        process.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    saved = saved_by(output)
    assert saved[0] == saved[1]
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == saved[0]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        f"step-{step}" for step in saved[0]
    }


@pytest.mark.slow
def test_a_signal_to_the_launcher(tmp_path: Path) -> None:
    """It passes the signal on to all ranks, and kills what is left after its own grace period."""
    job = start(tmp_path, 1000, 0.0)
    pid_in(tmp_path / "training-1", job)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=100)
    saved = saved_by(output)
    assert saved[0] == saved[1] and len(saved[0]) == 1, output
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{saved[0][0]}"]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_signals_in_the_middle_of_a_save(tmp_path: Path, rank: int) -> None:
    """The save goes on, however often it is said; one more is made at the next step."""
    job = start(tmp_path, 4, 1.0)
    pid = pid_in(tmp_path / f"saving-{rank}", job)
    for _ in range(3):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert saved_by(output) == {0: [4, 5], 1: [4, 5]}
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == [4, 5]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-4", "step-5"}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_at_the_keyboard_in_the_middle_of_a_save(tmp_path: Path, rank: int) -> None:
    job = start(tmp_path, 4, 1.0)
    pid = pid_in(tmp_path / f"saving-{rank}", job)
    os.kill(pid, signal.SIGINT)
    output, _ = job.communicate(timeout=100)
    assert job.returncode != 0
    assert "KeyboardInterrupt" in output
    assert saved_by(output) == {0: [], 1: []}
    assert [path.name for path in (tmp_path / "run").rglob("*")] == []
