"""One small model on every layout that training uses, on as many ranks as there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = ["LAYOUTS", "Job", "Layout", "build"]

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 6, 12, 4, 4, 7
LENGTH = 4
"""Tokens per sample: sequence parallelism splits them."""


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """All experts, each weighed by a router; sharded on their own mesh where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if isinstance(weight, DTensor):
            # Every rank of the mesh computes the same, so that each has the whole gradient.
            weight = weight.full_tensor(grad_placements=[Replicate()])
        share = torch.softmax(self.router(x), -1)
        return torch.einsum("bte,ehd,bth->btd", share, weight, x)


class Block(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.feed = Feed()
        self.experts = Experts() if has_experts else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.feed(self.norm(x))
        return x + self.experts(x) if self.experts is not None else x


class Decoder(nn.Module):
    """Layers are in a dict, so that a stage has the names of the whole.

    Args:
        layers: those that a pipeline stage has.
    """

    def __init__(self, has_experts: bool = False, layers: range = range(LAYERS)) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole = [Block(has_experts) for _ in range(LAYERS)]
        embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.embedding = embedding if 0 in layers else None
        self.layers = nn.ModuleDict({str(number): whole[number] for number in layers})
        self.head = head if LAYERS - 1 in layers else None
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


@dataclass
class Job:
    """What one rank trains.

    Attributes:
        model, optimizer, scheduler: as the user has them.
        step: one optimizer step on batch ``number``, the same batch on every rank; its loss, where
            this rank has it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: Callable[[int], float | None]

    def train(self, begin: int, end: int) -> list[float | None]:
        return [self.step(number) for number in range(begin, end)]


@dataclass(frozen=True)
class Layout:
    """A way to split the model.

    Attributes:
        wrap: puts the model on the layout.
        sizes: numbers of ranks that it works on.
        has_experts: whether the model is the one with experts.
    """

    wrap: Callable[[Decoder], nn.Module]
    sizes: tuple[int, ...]
    has_experts: bool = False


def build(name: str, lr: float = 0.05, device: str = "cpu") -> Job:
    """A freshly made job on a layout; on the device ``meta`` it has no memory yet."""
    if name == "pipeline":
        return _stage(lr)
    layout = LAYOUTS[name]
    with torch.device(device):
        bare = Decoder(layout.has_experts)
    model = layout.wrap(bare)

    def forward_and_backward(number: int) -> float:
        loss = _loss(model(_batch(number)), number)
        loss.backward()
        return float(loss.detach())

    return _job(model, lr, forward_and_backward)


def _job(model: nn.Module, lr: float, work: Callable[[int], float | None]) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step(number: int) -> float | None:
        optimizer.zero_grad()
        loss = work(number)
        optimizer.step()
        scheduler.step()
        return loss

    return Job(model, optimizer, scheduler, step)


def _batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def _loss(logits: torch.Tensor, number: int) -> torch.Tensor:
    whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
    target = _batch(number + 1000)
    return nn.functional.cross_entropy(whole.flatten(0, 1), target.flatten())


def _stage(lr: float) -> Job:
    """A stage of a pipeline: activations go on to the next rank, gradients back."""
    rank, size = dist.get_rank(), dist.get_world_size()
    per_stage = LAYERS // size
    model = Decoder(layers=range(rank * per_stage, (rank + 1) * per_stage))
    shape = (2, LENGTH, HIDDEN)

    def work(number: int) -> float | None:
        if rank == 0:
            x = _batch(number)
        else:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        out = model(x)
        loss = None
        if rank == size - 1:
            loss = _loss(out, number)
            loss.backward()
        else:
            dist.send(out.detach(), rank + 1)
            gradient = torch.empty(shape)
            dist.recv(gradient, rank + 1)
            out.backward(gradient)
        if rank:
            dist.send(x.grad, rank - 1)
        return None if loss is None else float(loss.detach())

    return _job(model, lr, work)


def _alone(model: Decoder) -> nn.Module:
    return model


def _fully_sharded(model: Decoder, mesh: Any) -> nn.Module:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _fsdp2(model: Decoder) -> nn.Module:
    return _fully_sharded(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def _hsdp(model: Decoder) -> nn.Module:
    names = ("replicate", "shard")
    return _fully_sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _context(model: Decoder) -> nn.Module:
    """Parameters are sharded over the data mesh and the same on all ranks of the context mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    return _fully_sharded(model, mesh["data"])


def _parallelized(model: Decoder, mesh: Any, sequence: bool) -> nn.Module:
    feed = {
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(),
    }
    if sequence:
        feed = {
            "norm": SequenceParallel(use_local_output=True),
            "feed": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(
            model,
            mesh,
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            },
        )
    else:
        parallelize_module(
            model,
            mesh,
            {
                "embedding": ColwiseParallel(output_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            },
        )
    for layer in model.layers.values():
        parallelize_module(layer, mesh, dict(feed))
    return model


def _tensor(model: Decoder) -> nn.Module:
    return _parallelized(model, init_device_mesh("cpu", (dist.get_world_size(),)), False)


def _sequence(model: Decoder) -> nn.Module:
    return _parallelized(model, init_device_mesh("cpu", (dist.get_world_size(),)), True)


def _fsdp2_over_tensor(model: Decoder) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    return _fully_sharded(_parallelized(model, mesh["tensor"], False), mesh["data"])


def _ddp(model: Decoder) -> nn.Module:
    return DistributedDataParallel(model)


def _experts(model: Decoder) -> nn.Module:
    """Experts on their own mesh, all the rest on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("expert",))
    for layer in model.layers.values():
        experts: Any = layer.experts
        experts.weight = nn.Parameter(distribute_tensor(experts.weight.detach(), mesh, [Shard(0)]))
    return model


def _fsdp1(model: Decoder) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def _compiled_ddp(model: Decoder) -> nn.Module:
    return torch.compile(
        DistributedDataParallel(torch.compile(model, backend="eager")), backend="eager"
    )


LAYOUTS: dict[str, Layout] = {
    "alone": Layout(_alone, (1,)),
    "ddp": Layout(_ddp, (2, 3)),
    "compiled ddp": Layout(_compiled_ddp, (2,)),
    "fsdp2": Layout(_fsdp2, (2, 3, 4, 1)),
    "hsdp": Layout(_hsdp, (4,)),
    "tensor": Layout(_tensor, (2, 4, 3)),
    "sequence": Layout(_sequence, (2, 4)),
    "fsdp2 over tensor": Layout(_fsdp2_over_tensor, (4,)),
    "context": Layout(_context, (4,)),
    "pipeline": Layout(_alone, (2, 4)),
    "fsdp1": Layout(_fsdp1, (2, 4)),
    "experts": Layout(_experts, (2, 4, 3), has_experts=True),
    "experts alone": Layout(_alone, (1,), has_experts=True),
}
