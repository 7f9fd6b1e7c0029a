"""Checkpoints as torchtitan lays them out, both ways; torchtitan itself is not needed.

It saves into ``step-N`` with plain DCP: the model's keys at the top, the optimizer's in the flat
layout beside them, ``lr_scheduler``, ``train_state`` and ``dataloader`` by name.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp_pipeline
from dcp_pipeline import CheckpointManager
from tests.distributed.pool import Pool

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class TrainState:
    """As torchtitan has it: counters as tensors in memory of bytes."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"].item())


class Loader:
    """Each data-parallel rank has a pickled state under a key of its own."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{dist.get_rank()}": bytes([self.position]), "world_size": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict[f"dp_rank_{dist.get_rank()}"][0]


class Job:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.ModuleDict({str(n): nn.Linear(8, 8) for n in range(2)})
        self.model = nn.Sequential(nn.Embedding(10, 8), *layers.values(), nn.Linear(8, 10))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.counter, self.loader = TrainState(), Loader()

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.loader.position += 1
            self.counter.step += 1
            torch.manual_seed(self.loader.position)
            tokens = torch.randint(10, (4, 6))
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """What torchtitan hands to DCP: objects that are flattened by their ``state_dict``."""
        return {
            **get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT),
            "lr_scheduler": self.scheduler,
            "train_state": self.counter,
            "dataloader": self.loader,
        }

    def take(self, state: dict[str, Any]) -> None:
        weights = {key: state[key] for key in get_model_state_dict(self.model)}
        set_model_state_dict(self.model, weights)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=FLAT)


def between(root: Path, saves_with_dcp: bool) -> list[float]:
    """Saved by the one, loaded by the other; the losses that differ."""
    job = Job(0)
    job.train(3)
    if saves_with_dcp:
        dcp.save(job.state(), checkpoint_id=root / "step-3")
    else:
        dcp_pipeline.save(job.state(), checkpoint_id=root / "step-3")
    resumed = Job(1)
    resumed.train(1)
    state = resumed.state()
    if saves_with_dcp:
        with CheckpointManager(root) as manager:
            assert manager.restore(state) == 3
    else:
        dcp.load(state, checkpoint_id=root / "step-3")
    resumed.take(state)
    expected, found = job.train(3), resumed.train(3)
    return [] if expected == found and resumed.counter.step == 6 else [*expected, *found]


@pytest.mark.parametrize("saves_with_dcp", [True, False])
def test_between_torchtitan_and_us(ranks: Pool, tmp_path: Path, saves_with_dcp: bool) -> None:
    assert ranks(2).run(between, tmp_path, saves_with_dcp) == [[], []]


def save_bare(path: Path) -> None:
    dcp.save(Job(0).state(), checkpoint_id=path)


def test_its_weights_without_a_template(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_bare, tmp_path)
    stored = dcp_pipeline.load_keys(tmp_path, ["0.weight", "3.*"])
    assert stored["0.weight"].shape == (10, 8)
    assert sorted(stored) == ["0.weight", "3.bias", "3.weight"]
