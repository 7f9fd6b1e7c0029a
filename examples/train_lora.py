"""LoRA: a checkpoint of what trains, 100 kB, that knows the 10 MB base it belongs to.

    torchrun --nproc-per-node 2 examples/train_lora.py outputs/lora 6
    torchrun --nproc-per-node 1 examples/train_lora.py outputs/lora 9            # goes on
    torchrun --nproc-per-node 1 examples/train_lora.py outputs/lora 12 --base 1  # refused

``ignore_frozen_params`` leaves the base out. Its fingerprint goes into the checkpoint, and a resume
compares it before anything is loaded: adapters on another base would train on without an error.
With peft installed the adapters are peft's, without it those below.
"""

import argparse
import importlib.util

import torch
import torch.distributed as dist
from counting import CONTEXT, next_byte_loss, sequences
from model import Decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_pipeline import AppState, CheckpointManager, StateDictOptions, fingerprint, load_keys

RANK = 7  # of the adapters, which makes 100 kB of them


def train(root: str, steps: int, base: int = 0, use_peft: bool = False) -> list[float]:
    """Train the adapters up to ``steps`` from the newest checkpoint in ``root``; the losses.

    Args:
        base: the seed that stands for the files of a pretrained model.

    Raises:
        ValueError: the checkpoint's adapters were trained on another base.
    """
    torch.manual_seed(base)
    model = Decoder(width=224, depth=4, heads=4, context=CONTEXT)
    # Before adapters and shards change names: it is the base's own, whatever is done with it.
    base_is = fingerprint({"base": model.state_dict()}).value
    trained = sharded(with_peft(model) if use_peft else with_adapters(model))
    # SGD keeps nothing; AdamW's two moments would make the checkpoint three times as large.
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.5)
    state = AppState(
        trained, optimizer, options=StateDictOptions(ignore_frozen_params=True), base=base_is
    )
    losses = []
    with CheckpointManager(root, save_every_steps=3) as checkpoints:
        newest = checkpoints.latest()
        if newest is not None:
            refuse_another_base(checkpoints.path(newest), base_is)
        for step in range((checkpoints.restore(state) or 0) + 1, steps + 1):
            text = sequences(step)
            loss = next_byte_loss(trained(text[:, :-1]), text[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if checkpoints.should_save(step):
                checkpoints.async_save(step, state)
    return losses


def refuse_another_base(path: str, base_is: str) -> None:
    saved = load_keys(path, ["base"])["base"]
    if saved != base_is:
        raise ValueError(
            f"{path} has adapters of the base {saved[:16]}, and this is {base_is[:16]}:"
            " load the base that they were trained on"
        )


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank one beside it that trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # to begin with, the adapter adds nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_adapters(model: Decoder) -> nn.Module:
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapted(block.attention.qkv)
    return model


def with_peft(model: Decoder) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, target_modules=["qkv"]))


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("steps", type=int)
    parser.add_argument("--base", type=int, default=0)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    has_peft = importlib.util.find_spec("peft") is not None
    found = train(given.root, given.steps, given.base, has_peft)
    if dist.get_rank() == 0:
        print(f"{len(found)} steps: {' '.join(f'{loss:.4f}' for loss in found)}")
    dist.destroy_process_group()
