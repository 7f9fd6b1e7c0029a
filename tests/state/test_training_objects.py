"""Schedulers, gradient scalers and averaged models beside a model: a resume is exact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from dcp_pipeline import AppState, load, save
from tests.distributed.pool import Pool
from tests.equal import assert_same

Scheduler = Any
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Scheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "swa": lambda o: SWALR(o, 0.01, anneal_epochs=5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Job:
    """A model that is trained with everything that keeps a state of its own beside it."""

    def __init__(self, scheduler: str = "step", mesh: Any = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        # Copies are made of the whole model: what is sharded cannot be copied.
        decay = get_ema_multi_avg_fn(0.9)
        ema = AveragedModel(self.model, multi_avg_fn=decay, use_buffers=mesh is None)
        self.averages = {"ema": ema, "swa": AveragedModel(self.model)}
        if mesh is not None:
            for module in (self.model, *(average.module for average in self.averages.values())):
                fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def train(self, begin: int, end: int) -> list[float]:
        found = []
        for number in range(begin, end):
            torch.manual_seed(number)
            loss = self.model(torch.randn(8, 4)).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            if number == 1:
                self.spoil()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if is_plateau else []))
            for average in self.averages.values():
                average.update_parameters(self.model)
            found.append(loss.item())
        return found

    def spoil(self) -> None:
        """A gradient that overflows: the scaler leaves this step out, and lowers its scale."""
        gradient = next(self.model.parameters()).grad
        assert gradient is not None
        with torch.no_grad():
            gradient.fill_(float("inf"))

    def app(self, **others: Any) -> AppState:
        return AppState(
            self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, **others
        )

    def beside(self) -> Any:
        found = {"scheduler": self.scheduler.state_dict(), "scaler": self.scaler.state_dict()}
        return found | {"lr": [group["lr"] for group in self.optimizer.param_groups]}


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in .scheduler.step")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_and_scalers(tmp_path: Path, scheduler: str) -> None:
    unbroken, broken, resumed = Job(scheduler), Job(scheduler), Job(scheduler)
    expected = unbroken.train(0, 6)
    broken.train(0, 3)
    save({"app": broken.app()}, checkpoint_id=tmp_path)
    assert broken.scaler.get_scale() != 1024.0
    resumed.train(10, 11)
    load({"app": resumed.app()}, checkpoint_id=tmp_path)
    assert resumed.train(3, 6) == expected[3:]
    assert_same(resumed.beside(), unbroken.beside())


def train_with_averages(path: Path, is_sharded: bool) -> list[str]:
    """What differs after a resume with two averages: a module, and one within the app."""
    mesh = init_device_mesh("cpu", (2,)) if is_sharded else None
    unbroken, broken, resumed = (Job(mesh=mesh) for _ in range(3))

    def state_of(job: Job) -> dict[str, Any]:
        return {"app": job.app(swa=job.averages["swa"]), "ema": job.averages["ema"]}

    expected = unbroken.train(0, 6)
    broken.train(0, 3)
    save(state_of(broken), checkpoint_id=path)
    resumed.train(10, 11)
    load(state_of(resumed), checkpoint_id=path)
    problems = [] if resumed.train(3, 6) == expected[3:] else ["other losses"]
    for name, average in unbroken.averages.items():
        found = resumed.averages[name].state_dict()
        for key, value in average.state_dict().items():
            if not torch.equal(local(found[key]), local(value)):
                problems.append(f"{name}: {key}")
    return problems


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_averaged_models(tmp_path: Path) -> None:
    assert train_with_averages(tmp_path, False) == []


def test_averaged_models_of_shards(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(train_with_averages, tmp_path, True) == [[], []]
