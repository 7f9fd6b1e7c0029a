"""What ranks hold of their own: random states, and the position of a loader."""

import random
from typing import Any

import numpy as np
import torch

KINDS = ["torch_save", "safetensors"]


def draw() -> list[Any]:
    return [
        [random.gauss(0, 1) for _ in range(3)],
        np.random.normal(size=3).tolist(),
        torch.randn(3).tolist(),
    ]


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    random.gauss(0, 1), np.random.normal()


class Loader:
    """Goes through numbers of its own; its state grows and changes its structure."""

    def __init__(self, start: int) -> None:
        self.start, self.seen = start, 0

    def step(self) -> int:
        self.seen += 1
        return self.start + self.seen

    def state_dict(self) -> dict[str, Any]:
        if not self.seen:
            return {}
        workers = {f"worker_{n}": {"rng": torch.full((n + 1,), self.start)} for n in range(2)}
        return {"start": self.start, "seen": self.seen} | (workers if self.seen > 2 else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.seen = state.get("start", self.start), state.get("seen", 0)
        assert ("worker_1" in state) == (self.seen > 2)


def loader_of(rank: int, steps: int) -> Loader:
    loader = Loader(1000 * rank)
    for _ in range(steps):
        loader.step()
    return loader
