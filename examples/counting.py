"""Bytes that count up from anywhere: a task that the short examples learn within a few steps."""

import torch
import torch.nn.functional as F

CONTEXT = 16


def sequences(step: int, batch: int = 8) -> torch.Tensor:
    """The same at the same step, on any number of ranks: ``[batch, CONTEXT + 1]``, int64."""
    random = torch.Generator().manual_seed(step)
    begins = torch.randint(256, (batch, 1), generator=random)
    return (begins + torch.arange(CONTEXT + 1)) % 256


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all bytes of ``[batch, CONTEXT, 256]`` against ``[batch, CONTEXT]``."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
