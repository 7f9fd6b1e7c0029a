"""`make demo`: train, lose a rank in the middle of a save, resume on 2, 1 and 3 ranks, compare.

Runs ``train_fsdp2.py`` under torchrun, in ``demo-run/``. Exits with 1 unless all of it holds.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checks import (
    Check,
    Losses,
    died_in_its_data,
    ended_by_sigkill,
    finished,
    losses_within,
    names_in,
    not_a_checkpoint,
    read_losses,
    same_state,
    tidied,
)
from rich.console import Console
from rich.table import Table

from dcp_pipeline import CheckpointManager, Pipeline

EXAMPLES = Path(__file__).resolve().parent
RUN = EXAMPLES.parent / "demo-run"
UNBROKEN, KILLED, WAITING = RUN / "unbroken", RUN / "killed", RUN / "killed-waiting"

STEPS, SAVE_EVERY = 12, 4
KILLED_RANK, KILLED_STEP, COMMITTED = 1, 8, 4
TORSO = KILLED / f"step-{KILLED_STEP}"
RESUMED = {2: KILLED, 1: RUN / "on-1-rank", 3: RUN / "on-3-ranks"}
"""Number of ranks to the directory that they resume in."""

TOLERANCE = 1e-5
"""Of the loss, on another number of ranks. A gradient is then a sum of the same float32 numbers in
another order, which moves a loss by a unit or two in its last place, 1e-7 of it. Resuming without
the optimizer's state would move it by 2e-2."""

PATIENCE = 100.0  # seconds for jobs that run at a time

console = Console(highlight=False)


def main() -> int:
    """Run the demo; 0 if everything holds."""
    started = time.monotonic()
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    checks = run_until_one_fails([lose_a_rank, resume, open_with_plain_dcp])
    show_checks(checks)
    failed = sum(not check.holds for check in checks)
    if failed:
        console.print(f"What the jobs printed is in {RUN.name}/*.log")
    say(f"{len(checks)} checks, {failed} failed, {time.monotonic() - started:.0f} seconds")
    return 1 if failed else 0


def run_until_one_fails(acts: Sequence[Callable[[], list[Check]]]) -> list[Check]:
    """The checks of every act; those behind one that failed are left out."""
    checks: list[Check] = []
    for act in acts:
        checks += act()
        if not all(check.holds for check in checks):
            break
    return checks


def lose_a_rank() -> list[Check]:
    """A run that nothing happens to, and two that lose a rank in the middle of a save.

    One of them trains while it saves, and the rank dies in the background; the other one waits.
    """
    say(f"{STEPS} steps on 2 ranks; and the same, but rank {KILLED_RANK} is killed in a save")
    unbroken = start("unbroken", 2, UNBROKEN)
    fault = f"train.kill_rank={KILLED_RANK}", f"train.kill_at_step={KILLED_STEP}"
    killed = start("killed", 2, KILLED, *fault)
    wait([unbroken, killed])
    waiting = start("killed-waiting", 2, WAITING, *fault, "train.asynchronous=false")
    wait([waiting])
    torsos = {killed: TORSO, waiting: WAITING / TORSO.name}
    steps = {}
    for job, torso in torsos.items():
        with CheckpointManager(torso.parent) as checkpoints:
            steps[job] = checkpoints.steps()
    return [
        finished("the unbroken run ends well", unbroken.exit_code, unbroken.log),
        *(
            check
            for job, how in ((killed, "in the background"), (waiting, "training waits"))
            for check in (
                ended_by_sigkill(
                    f"{how}: rank {KILLED_RANK} dies of SIGKILL, torchrun ends the job",
                    job.exit_code, job.log, KILLED_RANK,
                ),
                died_in_its_data(
                    f"{how}: it dies in the middle of its data",
                    job.log, torsos[job], UNBROKEN / TORSO.name, KILLED_RANK,
                ),
                not_a_checkpoint(
                    f"{how}: what it left is no checkpoint",
                    steps[job], [COMMITTED], torsos[job],
                ),
            )
        ),
    ]  # fmt: skip


def resume() -> list[Check]:
    """Resume what the killed run has left, on as many ranks as before, on fewer and on more."""
    say(f"Resume from step {COMMITTED}, the last one committed, on 2, 1 and 3 ranks")
    left = names_in(TORSO)
    for root in RESUMED.values():
        if root != KILLED:
            shutil.copytree(KILLED, root)
    jobs = {ranks: start(f"resumed-{ranks}", ranks, root) for ranks, root in RESUMED.items()}
    wait(jobs.values())
    unbroken = read_losses(RUN / "unbroken.jsonl")
    resumed = {ranks: read_losses(RUN / f"resumed-{ranks}.jsonl") for ranks in jobs}
    show_losses(unbroken, resumed)
    checks = []
    for ranks, job in jobs.items():
        steps, tolerance = range(COMMITTED + 1, STEPS + 1), 0.0 if ranks == 2 else TOLERANCE
        name = f"resumed on {ranks}: the unbroken run's loss"
        checks += [
            finished(f"resumed on {ranks}: ends well", job.exit_code, job.log),
            losses_within(name, unbroken, resumed[ranks], steps, tolerance),
        ]
    return [*checks, tidied("its save removes what the killed one left", left, TORSO)]


def open_with_plain_dcp() -> list[Check]:
    """Load the last checkpoint with PyTorch alone, and compare it with what ours reads."""
    say("Open the last checkpoint with plain torch.distributed.checkpoint")
    last, file = KILLED / f"step-{STEPS}", RUN / "plain.pt"
    command = [sys.executable, str(EXAMPLES / "plain_dcp.py"), str(last), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    loads = finished("plain DCP loads it, no dcp_pipeline", done.returncode, done.stderr)
    if not loads.holds:
        return [loads]
    plain = torch.load(file, weights_only=True)
    ours, unbroken = load_like(plain, last), load_like(plain, UNBROKEN / last.name)
    show_files(last, sum(tensor.numel() for tensor in plain["model"].values()))
    return [
        loads,
        same_state("plain DCP reads what dcp_pipeline reads", ours, plain),
        same_state("resumed on 2: the unbroken run's last state", unbroken, ours),
    ]


@dataclass(frozen=True)
class Job:
    """A torchrun job; what it prints goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def log(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode


def start(name: str, ranks: int, root: Path, *overrides: str) -> Job:
    """Start ``train_fsdp2.py`` on that many ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
        str(EXAMPLES / "train_fsdp2.py"), "checkpoint=tiny_decoder",
        f"train.root={root}", f"train.losses={RUN / name}.jsonl",
        f"train.steps={STEPS}", f"train.save_every={SAVE_EVERY}", *overrides,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = RUN / f"{name}.log"
    with open(output, "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    return Job(process, output)


def wait(jobs: Collection[Job]) -> None:
    """Until all have ended, or ``PATIENCE`` has."""
    deadline = time.monotonic() + PATIENCE
    try:
        for job in jobs:
            job.process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        console.print(f"still running after {PATIENCE:.0f} seconds: given up")
    finally:
        for job in jobs:
            if job.process.poll() is None:
                job.process.terminate()  # torchrun ends its ranks


def load_like(state: Any, checkpoint: Path) -> Any:
    """A checkpoint's values in the shape of ``state``, none of whose own values are kept."""
    loaded = blank(state)
    with Pipeline.from_recipe("tiny_decoder") as pipeline:
        pipeline.load(loaded, checkpoint)
    return loaded


def blank(state: Any) -> Any:
    """The same containers with zeros for tensors and ``None`` for other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def say(text: str) -> None:
    """A heading."""
    console.print(f"\n[bold]{text}[/bold]")


def show_losses(unbroken: Losses, resumed: dict[int, dict[int, float]]) -> None:
    """Loss by step of every run, and how far each is from the unbroken one."""
    table = Table("step", "unbroken", title="loss", box=None, header_style="bold")
    for ranks in resumed:
        table.add_column(f"{ranks} rank{'s' * (ranks > 1)}", justify="right")
        table.add_column("off by", justify="right")
    for step, loss in unbroken.items():
        cells = [str(step), f"{loss:.6f}"]
        for losses in resumed.values():
            found = losses.get(step)
            cells += ["", ""] if found is None else [f"{found:.6f}", f"{found - loss:.2g}"]
        table.add_row(*cells)
    console.print(table)


def show_files(checkpoint: Path, parameters: int) -> None:
    """What the last checkpoint consists of."""
    kinds = {
        ".distcp": "data of one rank",
        ".sums": "checksums of one rank's blocks",
        ".json": "the commit record",
        "": "the same, for plain DCP",
    }
    title = f"{checkpoint.relative_to(RUN.parent)}: {parameters:,} parameters and AdamW's moments"
    table = Table("file", title=title, box=None, header_style="bold")
    table.add_column("bytes", justify="right")
    table.add_column("what it is")
    sizes = {file: file.stat().st_size for file in sorted(checkpoint.iterdir())}
    for file, size in sizes.items():
        table.add_row(file.name, f"{size:,}", kinds.get(file.suffix, ""))
    total = sum(sizes.values())
    table.add_row("all", f"{total:,}", f"{total / (12 * parameters):.3f} of 12 bytes a parameter")
    console.print(table)


def show_checks(checks: Sequence[Check]) -> None:
    """Every check on a line of its own."""
    console.print()
    for check in checks:
        mark = "[green]ok    [/green]" if check.holds else "[bold red]FAILED[/bold red]"
        console.print(f"{mark} {check.name}: ", end="")
        console.print(check.found, markup=False, style="dim")


if __name__ == "__main__":
    sys.exit(main())
