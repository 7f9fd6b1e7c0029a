"""Pipeline stages: every rank trains some of the blocks, and saves them under the model's names.

    torchrun --nproc-per-node 2 examples/train_pipeline.py outputs/pipeline 6
    torchrun --nproc-per-node 4 examples/train_pipeline.py outputs/pipeline 9    # goes on

Stages have no keys in common, except the groups of their optimizers: in torch's nested layout these
are one list, which is another one on each stage. The flat layout has a key for each value instead.
A stage of another number of ranks finds its blocks by name, and so does a model in one piece.
"""

import sys

import torch
import torch.distributed as dist
from counting import CONTEXT, next_byte_loss, sequences
from model import Decoder
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from dcp_pipeline import AppState, CheckpointManager, StateDictOptions

DEPTH, MICROBATCHES = 4, 4


def train(root: str, steps: int) -> list[float]:
    """Train up to ``steps`` from the newest checkpoint; the last stage's losses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Stage(decoder(), rank, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=next_byte_loss)
    state = AppState(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    found = []
    with CheckpointManager(root, save_every_steps=3) as checkpoints:
        for step in range((checkpoints.restore(state) or 0) + 1, steps + 1):
            text = sequences(step)
            losses: list[torch.Tensor] = []  # of every microbatch, on the last stage
            inputs = (text[:, :-1],) if stage.is_first else ()
            of_last = {"target": text[:, 1:], "losses": losses} if stage.is_last else {}
            schedule.step(*inputs, **of_last)
            optimizer.step()
            optimizer.zero_grad()
            if stage.is_last:
                found.append(float(torch.stack(losses).detach().mean()))
            if checkpoints.should_save(step):
                checkpoints.async_save(step, state)
    return found


def decoder() -> Decoder:
    return Decoder(width=32, depth=DEPTH, heads=2, context=CONTEXT)


class Stage(nn.Module):
    """A rank's part of a decoder, whose names are those of the whole.

    A ``ModuleList`` would number its blocks anew; a ``ModuleDict`` keeps their numbers.
    """

    def __init__(self, whole: Decoder, rank: int, size: int) -> None:
        super().__init__()
        is_first, is_last = rank == 0, rank == size - 1
        self.bytes = whole.bytes if is_first else None
        self.positions = whole.positions if is_first else None
        mine = range(DEPTH * rank // size, DEPTH * (rank + 1) // size)
        self.blocks = nn.ModuleDict({str(number): whole.blocks[number] for number in mine})
        self.norm = whole.norm if is_last else None
        self.head = whole.head if is_last else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.bytes is not None and self.positions is not None:
            hidden = self.bytes(hidden) + self.positions(torch.arange(hidden.shape[1]))
        for block in self.blocks.values():
            hidden = block(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = train(sys.argv[1], int(sys.argv[2]))
    if found:
        print(f"{len(found)} steps: {' '.join(f'{loss:.4f}' for loss in found)}")
    dist.destroy_process_group()
