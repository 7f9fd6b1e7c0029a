"""Checkpoints that other packages have written themselves, as sources.

torchsnapshot 0.1 (with importlib_metadata, aiofiles, aiohttp, nest_asyncio), accelerate's own
``save_fsdp_model`` and ``save_fsdp_optimizer``, and Megatron-core's ``dist_checkpointing``, which
asks for a GPU in two places where it needs none.
"""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from dcp_pipeline.layout.foreign import recognize
from tests.distributed.pool import Pool
from tests.foreign.loading import assert_equal, nested

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own


def test_torchsnapshot(tmp_path: Path) -> None:
    torchsnapshot = pytest.importorskip("torchsnapshot")
    model = torch.nn.Linear(3, 4).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    progress: dict[str, Any] = {
        "steps": 3, "lr": 0.1, "name": "x", "is_done": True, "raw": b"ab", "seen": {1, 2},
        "nest": [1, {"a/b": torch.ones(2)}], "none": None, "nothing": {},
        "turned": torch.arange(6.0).view(2, 3).t(), "complex": torch.ones(2, dtype=torch.complex64),
    }  # fmt: skip
    app = {"model": model, "optim": optimizer, "progress": torchsnapshot.StateDict(**progress)}
    torchsnapshot.Snapshot.take(str(tmp_path), app)
    assert recognize(str(tmp_path)) == "torchsnapshot"
    wanted = {
        "model": dict(model.state_dict()), "optim": optimizer.state_dict(), "progress": progress,
    }  # fmt: skip
    assert_equal(nested(tmp_path), wanted)


def save_by_accelerate(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from accelerate.state import PartialState
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        cpu_ram_efficient_loading=False,
        state_dict_config=SimpleNamespace(offload_to_cpu=False, rank0_only=False),
    )
    accelerator = SimpleNamespace(process_index=0, num_processes=2)
    PartialState(cpu=True)  # which its logging asks for
    try:
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(path))
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(path))
    finally:
        PartialState._reset_state()
    names = dict(model.named_parameters())
    weights = {name: one.detach().full_tensor() for name, one in names.items()}
    moments = {
        name: {key: _whole(part) for key, part in optimizer.state[one].items()}
        for name, one in names.items()
    }
    return weights, moments


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_accelerate(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    weights, moments = ranks(2).run(save_by_accelerate, tmp_path, seconds=300)[0]
    assert recognize(str(tmp_path)) == "accelerate"
    found = nested(tmp_path)
    assert_equal(found["model"], weights)
    assert_equal(found["optimizer"]["state"], moments)
    assert found["optimizer"]["param_groups"][0]["params"] == list(weights)


def save_by_megatron(path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank = torch.distributed.get_rank()
    part = torch.arange(12.0).view(4, 3) + 100 * rank
    state = {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("decoder.weight", part, (0, rank, 2)),
            "norm": ShardedTensor.from_rank_offsets("norm", torch.ones(3), replica_id=rank),
        },
        "rng": ShardedObject("rng_state", {"seed": 1}, (1,), (0,), replica_id=rank),
        "args": argparse.Namespace(lr=0.1, dtype=torch.float32),
        "iteration": 5,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        dist_checkpointing.save(state, str(path))


def test_megatron_core(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    ranks(2).run(save_by_megatron, tmp_path, seconds=300)
    assert recognize(str(tmp_path)) == "megatron_dist"
    half = torch.arange(12.0).view(4, 3)
    wanted = {
        "decoder.weight": torch.cat([half, half + 100]),
        "norm": torch.ones(3),
        "rng_state/shard_0_1": [{"seed": 1}],
        "args": {"lr": 0.1, "dtype": torch.float32},
        "iteration": 5,
    }
    assert_equal(nested(tmp_path), wanted)
