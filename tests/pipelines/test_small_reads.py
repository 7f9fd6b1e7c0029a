"""U05 for tensors below the size of a block: what is read too much has a bound, which is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from dcp_pipeline import Pipeline
from tests.distributed.pool import Pool
from tests.marks import mostly_slow
from tests.state.placements import placements_of

SIZE = 4


def state(placement: str, fill: float) -> dict[str, Any]:
    """150 tensors of 4 KiB, a fraction of a block each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((32, 32), fill)
    return {
        str(number): distribute_tensor(whole + number, mesh, placements_of([placement]))
        for number in range(150)
    }


def save(path: Path, config: dict[str, Any]) -> None:
    with Pipeline.from_config(config) as pipeline:
        pipeline.save(state("S0", 1.0), path)


def load(path: Path, placement: str, config: dict[str, Any]) -> tuple[int, int]:
    """Load, compare, and count ``(bytes read, bytes of all tensors)``."""
    found, wanted = state(placement, -1.0), state(placement, 1.0)
    with Pipeline.from_config(config) as pipeline:
        report = pipeline.load(found, path)
    for name, value in wanted.items():
        assert torch.equal(found[name].to_local(), value.to_local()), name
    return report.bytes_read, sum(v.numel() * v.element_size() for v in found.values())


KINDS = ["torch_save", "safetensors"]
WAYS = [("auto", "S1"), ("once", "S1"), ("once", "R"), ("each", "S1")]


@pytest.mark.parametrize(
    ("mode", "placement", "serialization"),
    mostly_slow(
        [(*way, kind) for way in WAYS for kind in KINDS],
        [("auto", "S1", "safetensors"), ("once", "R", "torch_save"), ("each", "S1", "torch_save")],
    ),
)
def test_no_block_is_read_twice_by_a_rank(
    ranks: Pool, tmp_path: Path, serialization: str, mode: str, placement: str
) -> None:
    config = {"serialization": serialization, "read_replicas": mode}
    ranks(SIZE).run(save, tmp_path, config)
    extension = ".safetensors" if serialization == "safetensors" else ".distcp"
    stored = sum(path.stat().st_size for path in tmp_path.glob(f"*{extension}"))
    counts = ranks(SIZE).run(load, tmp_path, placement, config)
    read, total = sum(count for count, _ in counts), counts[0][1]
    if mode == "each":
        assert all(count <= stored for count, _ in counts)
    else:
        # Framing included: a zip per item costs more than a kilobyte of a small tensor is.
        assert read <= stored
    if serialization == "safetensors" and mode != "each":
        assert read <= 1.2 * total, f"{read / total:.3f} of what is needed was read"
