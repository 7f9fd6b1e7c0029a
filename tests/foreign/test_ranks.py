"""Foreign checkpoints read by two ranks into their shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.tools.sources import open_on_ranks
from tests.distributed.pool import Pool
from tests.equal import bits
from tests.foreign.deepspeed_files import write_universal, write_zero
from tests.foreign.loading import load_foreign
from tests.foreign.snapshot_files import write_snapshot
from tests.foreign.test_dcp_inside import accelerate_folder
from tests.foreign.test_megatron import write as write_megatron


def leaves(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The tensors and single values of nested mappings."""
    if not isinstance(state, dict) or not state:
        return {path: state}
    found: dict[tuple[Any, ...], Any] = {}
    for name, part in state.items():
        found |= leaves(part, (*path, name))
    return found


def load_shards(path: Path, wanted: dict[str, Any]) -> list[str]:
    """Load what is wanted, tensors as shards of both kinds; where it differs on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    expected = leaves(wanted)
    for number, (place, value) in enumerate(expected.items()):
        part = state
        for name in place[:-1]:
            part = part.setdefault(name, {})
        part[place[-1]] = None
        if isinstance(value, torch.Tensor):
            axis = number % value.dim() if value.dim() else 0
            placement = Shard(axis) if value.dim() else Replicate()
            part[place[-1]] = distribute_tensor(torch.zeros_like(value), mesh, [placement])
    load_foreign(state, path)
    found = leaves(state)
    different = []
    for place, value in expected.items():
        one = found[place]
        if isinstance(value, torch.Tensor):
            assert isinstance(one, DTensor)
            if not torch.equal(bits(one.full_tensor()), bits(value)):
                different.append(str(place))
        elif one != value:
            different.append(f"{place}: {one} is not {value}")
    return different


@pytest.mark.parametrize(
    "kind",
    ["deepspeed", "deepspeed 2", "deepspeed_universal", "torchsnapshot", "megatron", "accelerate",
     "torch_save"],
)  # fmt: skip
def test_two_ranks_read_their_shards(ranks: Pool, tmp_path: Path, kind: str) -> None:
    if kind == "deepspeed":
        wanted = write_zero(tmp_path, 3, 3)
    elif kind == "deepspeed 2":
        wanted = write_zero(tmp_path, 2, 3)
    elif kind == "deepspeed_universal":
        wanted = write_universal(tmp_path)
    elif kind == "torchsnapshot":
        wanted = write_snapshot(tmp_path)
    elif kind == "megatron":
        wanted = write_megatron(tmp_path, 2, 1)
    elif kind == "accelerate":
        wanted = {"model": accelerate_folder(tmp_path)[0]}
    else:
        turned = torch.arange(24.0).view(4, 6).t()
        wanted = {"w": turned, "part": turned[1:5, :3], "step": 3}
        torch.save(wanted, tmp_path / "x.pt")
    assert ranks(2).run(load_shards, tmp_path, wanted) == [[], []]


def open_together(path: Path) -> tuple[str, ...]:
    coordinator = PipelineConfig().coordination.build().coordinator(None, False, 0)
    return open_on_ranks(str(path), None, {}, coordinator)[1].names


def test_sets_of_texts_do_not_make_ranks_disagree(ranks: Pool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "tags": set("abcdefghijkl")}, tmp_path / "x.pt")
    assert ranks(2).run(open_together, tmp_path) == [("w", "tags")] * 2
