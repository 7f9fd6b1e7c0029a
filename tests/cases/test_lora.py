"""T80: an adapter alone is saved, and belongs to the base that it was trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_pipeline import AppState, StateDictOptions, fingerprint, load, load_keys, save
from tests.distributed.pool import Pool

WIDTH, RANK = 1600, 8
"""A base of 10,240,000 bytes, and 102,400 bytes of adapter."""


class Adapted(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Job:
    """A user's training, with what a user has to write for the base."""

    def __init__(self, seed: int = 0) -> None:
        model = Adapted(seed)
        self.base = fingerprint({"base": model.base.state_dict()}).value
        self.model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)
        options = StateDictOptions(ignore_frozen_params=True)
        self.app = AppState(self.model, self.optimizer, options=options, base=self.base)

    def train(self, begin: int, end: int) -> list[float]:
        losses = []
        for number in range(begin, end):
            torch.manual_seed(number)
            loss = self.model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def resume(self, path: Path) -> None:
        saved = load_keys(path, ["app.base"])["app"]["base"]
        if saved != self.base:
            raise ValueError(f"trained on the base {saved[:16]}, and this is {self.base[:16]}")
        load({"app": self.app}, checkpoint_id=path)


def train_and_save(path: Path) -> list[float]:
    job = Job()
    job.train(0, 2)
    save({"app": job.app}, checkpoint_id=path)
    return job.train(2, 4)


def go_on(path: Path) -> list[float]:
    job = Job()
    job.train(10, 11)  # other adapters than those that were saved
    job.resume(path)
    return job.train(2, 4)


def go_on_with_another_base(path: Path) -> Any:
    job = Job(seed=1)
    before = fingerprint(job.model.state_dict())
    with pytest.raises(ValueError, match="trained on the base") as caught:
        job.resume(path)
    assert fingerprint(job.model.state_dict()) == before
    return str(caught.value)


@pytest.mark.parametrize(("size", "other"), [(1, 2), (2, 1)])
def test_t80_an_adapter_over_a_frozen_base(
    ranks: Pool, tmp_path: Path, size: int, other: int
) -> None:
    unbroken = ranks(size).run(train_and_save, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200_000
    stored = load_keys(tmp_path)["app"]
    assert stored["model"].keys() == {"down.weight", "up.weight"}

    assert ranks(size).run(go_on, tmp_path) == unbroken
    elsewhere = ranks(other).run(go_on, tmp_path)
    assert elsewhere[0] == pytest.approx(unbroken[0], rel=1e-5)

    refused = ranks(other).run(go_on_with_another_base, tmp_path)
    assert all(stored["base"][:16] in message for message in refused)
