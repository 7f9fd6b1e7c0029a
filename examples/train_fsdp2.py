"""Train a small decoder with FSDP2, save as the config says, and resume from what is there.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py checkpoint=tiny_decoder train.steps=40
    torchrun --nproc-per-node 2 examples/train_fsdp2.py \
        checkpoint/serialization=safetensors checkpoint.storage.thread_count=4

Saves go on in the background; with ``train.asynchronous=false`` training waits for them. Start it
again, on as many ranks as you like, and it goes on from the newest checkpoint that is whole.
On SIGTERM to any rank it saves the step that it is in, and ends.
The config is in ``conf/train.yaml``, the model in ``model.py``, the data in ``text.py``.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fault import killed_in_a_save
from model import Decoder
from omegaconf import DictConfig
from text import Text
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from dcp_pipeline import AppState, CheckpointManager, Pipeline, PipelineConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Train from the newest checkpoint, or from the start, to the end."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train = config.train

    model = sharded_model(config.model, train.seed, world_size)
    optimizer = AdamW(model.parameters(), lr=train.learning_rate)
    scheduler = warm_up_then_cosine(optimizer, train.warm_up, train.steps)
    text = Text(train.batch, config.model.context, train.seed)
    progress = Progress()
    state = AppState(model, optimizer, scheduler=scheduler, progress=progress)

    with (
        Pipeline.from_config(checkpoint_config(config)) as pipeline,
        CheckpointManager(train.root, pipeline, save_every_steps=train.save_every) as checkpoints,
    ):
        checkpoints.restore(state)  # sets progress.step, unless there is no checkpoint yet
        for step in range(progress.step + 1, (train.stop_after or train.steps) + 1):
            sequences = text.share(step, rank, world_size)
            learning_rate = scheduler.get_last_lr()[0]
            loss = train_step(model, optimizer, scheduler, sequences)
            progress.advance(train.batch * config.model.context)
            if rank == 0:
                report(train.losses, step, loss, learning_rate, world_size)
            is_last = checkpoints.should_stop()  # SIGTERM, on any rank
            if is_last or checkpoints.should_save(step):
                save = checkpoints.async_save if train.asynchronous else checkpoints.save
                save(step, state)
            if is_last:
                break

    dist.destroy_process_group()


def sharded_model(shape: DictConfig, seed: int, world_size: int) -> Decoder:
    """The model with the same first weights on any number of ranks, sharded over all of them."""
    torch.manual_seed(seed)
    model = Decoder(**shape)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def warm_up_then_cosine(optimizer: AdamW, warm_up: int, steps: int) -> LambdaLR:
    """A learning rate that rises linearly, then falls to a tenth along a cosine."""

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.55 + 0.45 * math.cos(math.pi * done)

    return LambdaLR(optimizer, factor)


def train_step(
    model: nn.Module, optimizer: AdamW, scheduler: LambdaLR, sequences: torch.Tensor
) -> float:
    """Learn from this rank's sequences; the mean loss of all ranks' sequences."""
    logits = model(sequences[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


@dataclass
class Progress:
    """How far the run is; saved with the model because AppState is given it."""

    step: int = 0
    bytes_seen: int = 0

    def advance(self, nbytes: int) -> None:
        """One more step is done."""
        self.step += 1
        self.bytes_seen += nbytes

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def checkpoint_config(config: DictConfig) -> DictConfig | PipelineConfig:
    """The node ``checkpoint`` as it is; for the demo, with a rank that dies."""
    train = config.train
    if train.kill_rank is None:
        return config.checkpoint
    return killed_in_a_save(config.checkpoint, train.kill_rank, train.kill_at_step)


def report(path: str, step: int, loss: float, learning_rate: float, world_size: int) -> None:
    """Print a step, and append it to the losses with every bit of the loss."""
    print(f"step {step:4}  loss {loss:.6f}  learning rate {learning_rate:.2e}", flush=True)
    line = {"step": step, "loss": loss.hex(), "learning_rate": learning_rate, "ranks": world_size}
    os.makedirs(Path(path).parent, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
