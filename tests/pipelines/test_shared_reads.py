"""U05: what several ranks need is read once and passed on; the bytes are counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from dcp_pipeline import Pipeline
from dcp_pipeline.core.errors import ChecksumError
from tests.distributed.outcome import Failure
from tests.distributed.pool import Pool
from tests.marks import mostly_slow, slow
from tests.state.placements import placements_of

ROWS, COLUMNS = 1024, 768


def full() -> dict[str, torch.Tensor]:
    big = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
    return {"big": big, "odd": big[:777, :333].clone(), "small": torch.arange(7.0)}


def sharded(placement: str, fill: float | None = None) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            value if fill is None else torch.full_like(value, fill),
            mesh,
            placements_of([placement]),
        )
        for name, value in full().items()
        if name != "small" or placement in ("S0", "R")
    }


def save(path: Path, placement: str, config: dict[str, Any]) -> None:
    with Pipeline.from_config(config) as pipeline:
        pipeline.save(sharded(placement), path)


def load(path: Path, placement: str, config: dict[str, Any]) -> tuple[int, int]:
    """Load, compare, and count ``(bytes read, bytes of this rank's shards)``."""
    state = sharded(placement, fill=-1.0)
    with Pipeline.from_config({**config, "strict": {"small": False}}) as pipeline:
        report = pipeline.load(state, path)
    wanted = sharded(placement)
    assert {"big", "odd"} <= set(report.loaded)
    for name in report.loaded:
        assert torch.equal(state[name].to_local(), wanted[name].to_local()), name
    assert report.is_verified
    loaded = [state[name].to_local() for name in report.loaded]
    local = sum(value.numel() * value.element_size() for value in loaded)
    return report.bytes_read, local


def total_bytes() -> int:
    return sum(value.numel() * value.element_size() for value in full().values())


KINDS = ["torch_save", "safetensors"]
WAYS = [
    ((2, "S0"), (4, "S0"), "auto"),
    ((2, "S0"), (4, "S0"), "once"),
    ((4, "S0"), (4, "S1"), "auto"),
    ((4, "S0"), (4, "S1"), "once"),
    ((3, "S1"), (2, "S0"), "auto"),
    ((4, "S0"), (4, "R"), "once"),
    ((1, "R"), (3, "R"), "once"),
]


@pytest.mark.parametrize(
    ("source", "target", "mode", "serialization"),
    mostly_slow(
        [(*way, kind) for way in WAYS for kind in KINDS],
        [(*way, KINDS[number % 2]) for number, way in enumerate(WAYS)],
    ),
)
def test_every_byte_is_read_once(
    ranks: Pool,
    tmp_path: Path,
    source: tuple[int, str],
    target: tuple[int, str],
    mode: str,
    serialization: str,
) -> None:
    config = {"serialization": serialization, "read_replicas": mode}
    ranks(source[0]).run(save, tmp_path, source[1], config)
    counts = ranks(target[0]).run(load, tmp_path, target[1], config)
    read, needed = (sum(column) for column in zip(*counts, strict=True))
    unique = total_bytes() if target[1] == "R" else needed
    assert read <= 1.05 * unique, f"{read / unique:.3f} of what is needed was read"


def test_each_rank_reads_replicas_itself_when_told_so(ranks: Pool, tmp_path: Path) -> None:
    config = {"read_replicas": "each"}
    ranks(2).run(save, tmp_path, "S0", config)
    counts = ranks(3).run(load, tmp_path, "R", config)
    assert all(read >= needed for read, needed in counts)


def test_verify_first_reads_shared_blocks_once_for_each_pass(ranks: Pool, tmp_path: Path) -> None:
    config = {"read_replicas": "once", "rollback": "verify_first"}
    ranks(2).run(save, tmp_path, "S0", config)
    counts = ranks(3).run(load, tmp_path, "R", config)
    assert sum(read for read, _ in counts) <= 2.1 * total_bytes()


def load_damaged(path: Path, placement: str, rollback: str) -> list[str]:
    state = sharded(placement, fill=-1.0)
    before = {name: value.to_local().clone() for name, value in state.items()}
    config = {"read_replicas": "once", "rollback": rollback, "strict": {"small": False}}
    with Pipeline.from_config(config) as pipeline, pytest.raises(ChecksumError) as caught:
        pipeline.load(state, path)
    for name, value in state.items():
        assert torch.equal(value.to_local(), before[name]), name
    return [str(caught.value)]


@pytest.mark.parametrize(
    ("placement", "rollback"),
    [slow("S1", "copy"), ("S1", "verify_first"), ("R", "copy"), slow("R", "verify_first")],
)
def test_a_flip_in_a_block_that_one_rank_reads_stops_all(
    ranks: Pool, tmp_path: Path, placement: str, rollback: str
) -> None:
    ranks(2).run(save, tmp_path, "S0", {})
    data = next(tmp_path.glob("__1_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 1
    data.write_bytes(content)
    for outcome in ranks(3).run(load_damaged, tmp_path, placement, rollback):
        assert not isinstance(outcome, Failure)
        assert data.name in outcome[0]
        assert "big" in outcome[0]
