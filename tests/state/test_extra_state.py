"""Extra state of modules: bytes of changing size, as TransformerEngine keeps them for FP8."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_pipeline import AppState, load, save


class Scaled(nn.Linear):
    """Keeps a history, which it gives as a tensor of pickled bytes, a stream, or nothing at all."""

    def __init__(self, kind: str) -> None:
        super().__init__(3, 3)
        self.kind = kind
        self.history: list[float] = []

    def get_extra_state(self) -> Any:
        if not self.history:
            return torch.empty(0, dtype=torch.uint8) if self.kind == "tensor" else io.BytesIO()
        pickled = pickle.dumps(self.history)
        if self.kind == "tensor":
            return torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        return io.BytesIO(pickled)

    def set_extra_state(self, state: Any) -> None:
        found = state.numpy().tobytes() if self.kind == "tensor" else state.getvalue()
        self.history = pickle.loads(found) if found else []


def model_of(kind: str, *lengths: int) -> nn.Sequential:
    model = nn.Sequential(*(Scaled(kind) for _ in lengths))
    for layer, length in zip(model, lengths, strict=True):
        layer.history = [0.5 * number for number in range(length)]
    return model


@pytest.mark.parametrize("kind", ["stream", "tensor"])
def test_bytes_of_another_size(tmp_path: Path, kind: str) -> None:
    saved = model_of(kind, 40, 0, 7)
    save({"app": AppState(saved)}, checkpoint_id=tmp_path)
    loaded = model_of(kind, 3, 5, 0)
    load({"app": AppState(loaded)}, checkpoint_id=tmp_path)
    assert [layer.history for layer in loaded] == [layer.history for layer in saved]
