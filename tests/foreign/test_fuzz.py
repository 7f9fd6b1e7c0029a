"""Files that are damaged at random: read, or refused by an error of the package, and soon."""

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import CheckpointError
from tests.foreign.deepspeed_files import write_universal, write_zero
from tests.foreign.loading import opened
from tests.foreign.snapshot_files import write_snapshot
from tests.foreign.test_dcp_inside import accelerate_folder, megatron_dist
from tests.foreign.test_megatron import write as write_megatron
from tests.foreign.test_torch_save import training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_KIB = 400 << 10


def torch_save(path: Path) -> None:
    torch.save(training_state(), path / "run.pt")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "torch_save": torch_save,
    "accelerate": accelerate_folder,
    "megatron_dist": megatron_dist,
    "megatron": lambda path: write_megatron(path, 2, 1),
    "deepspeed": lambda path: write_zero(path, 3, 2),
    "deepspeed_universal": write_universal,
    "torchsnapshot": write_snapshot,
}


def damaged(data: bytes, dice: random.Random) -> bytes:
    """The same with one thing changed: bytes, a length, the end, a piece that stands twice."""
    at = dice.randrange(len(data) + 1)
    match dice.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + dice.randbytes(dice.randrange(1, 9)) + data[at:]
        case 2:
            return data[:at] + data[at + dice.randrange(1, 9) :]
        case 3:
            return data[:at] + b"\xff" * 8 + data[at + 8 :]
        case _:
            return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "rounds"),
    [(kind, 40) for kind in WRITERS]
    + [pytest.param(kind, 1000, marks=pytest.mark.slow) for kind in WRITERS],
)
def test_damage_is_refused_by_name_and_soon(tmp_path: Path, kind: str, rounds: int) -> None:
    WRITERS[kind](tmp_path)
    opened(tmp_path, kind)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    dice = random.Random(f"{kind} {rounds}")
    refused = 0
    for _ in range(rounds):
        file = dice.choice(files)
        whole = file.read_bytes()
        if not whole:
            continue
        file.write_bytes(damaged(whole, dice))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            opened(tmp_path, kind)
        except CheckpointError:
            refused += 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < _KIB
        file.write_bytes(whole)
    assert refused
    opened(tmp_path, kind)
