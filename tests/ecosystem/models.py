"""Models of other packages, tiny and random, as their users shard and train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_pipeline import AppState

__all__ = ["MODELS", "Job", "sharded"]

VOCABULARY, WIDTH = 32, 16


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **_SIZES))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(experts_implementation="eager", **experts, **_SIZES))


_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(tied=False),
    "tied llama": lambda: llama(tied=True),
    "mixtral": mixtral,
}


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Job:
    """A language model in training.

    Args:
        make: what makes it.
        seed: of its first weights.
        prepare: shards it, or wraps it.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        seed: int,
        prepare: Callable[[Any], Any] = sharded,
    ) -> None:
        torch.manual_seed(seed)
        self.model = prepare(make())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)

    def train(self, begin: int, end: int) -> list[float]:
        losses = []
        for number in range(begin, end):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(1, VOCABULARY, (2, 8), generator=generator)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def app(self, **others: Any) -> AppState:
        return AppState(self.model, self.optimizer, **others)
