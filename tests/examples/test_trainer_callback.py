"""The callback for transformers' Trainer, where that is installed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.running import call

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(root: Path, until: int, seed: int) -> dict[str, torch.Tensor]:
    """Train eight steps, or leave after some of them, as a job does whose time is up."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, attention_dropout=0.5, **sizes, **heads))
    arguments = TrainingArguments(
        str(root / "trainer"),
        max_steps=8,
        per_device_train_batch_size=4,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    saving = call("trainer_callback", "Checkpoints", str(root), save_every_steps=2, keep_last=2)
    leaving: Any = leave_after(until)
    Trainer(model, arguments, train_dataset=Tokens(), callbacks=[saving, leaving]).train()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def leave_after(step: int) -> object:
    from transformers import TrainerCallback

    class Leave(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= state.global_step >= step

    return Leave()


def test_a_resume_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    unbroken = train(tmp_path / "unbroken", until=8, seed=0)
    train(tmp_path / "broken", until=4, seed=0)
    assert sorted(os.listdir(tmp_path / "broken")) == ["step-2", "step-4", "trainer"]
    resumed = train(tmp_path / "broken", until=8, seed=1)
    assert resumed.keys() == unbroken.keys()
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    assert sorted(os.listdir(tmp_path / "broken")) == ["step-6", "step-8", "trainer"]
