"""A callback that saves and restores what a Hugging Face ``Trainer`` trains.

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Checkpoints("outputs/hf")])
    trainer.train()  # goes on from the newest whole checkpoint, if there is one

The ``Trainer``'s own checkpoints are switched off (``save_strategy="no"``). What was seen of the
data is skipped; an epoch that is not the first one comes in the first one's order after a resume,
since the ``Trainer`` counts epochs anew.
"""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dcp_pipeline import AppState, CheckpointManager, RankLocal, RngState


class Checkpoints(TrainerCallback):
    """Saves in the background, leaves on SIGTERM to any rank, and restores on the next start.

    Args:
        root: directory of the checkpoints.
        settings: of the ``CheckpointManager``, such as ``save_every_steps`` and ``keep_last``.
    """

    def __init__(self, root: str, **settings: Any) -> None:
        self._root, self._settings = root, settings

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._manager = CheckpointManager(self._root, **self._settings)
        self._app = self._state_of(**kwargs)
        state.global_step = self._manager.restore({"app": self._app}) or 0
        self._random = RngState().state_dict() if state.global_step else {}
        batches = kwargs["train_dataloader"]  # accelerate's
        seen = state.global_step * args.gradient_accumulation_steps
        batches.skip_batches = seen % len(batches)
        control.should_training_stop = state.global_step >= state.max_steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._random:  # skipping has drawn numbers, which the unbroken run did not
            RngState().load_state_dict(self._random)
            self._random = {}

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        kwargs["train_dataloader"].skip_batches = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        is_last = self._manager.should_stop()
        if is_last or self._manager.should_save(step):
            self._manager.async_save(step, {"app": self._app})
        control.should_training_stop |= is_last

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._manager.close()  # waits for what is under way

    def _state_of(
        self, model: nn.Module, optimizer: Any, lr_scheduler: Any, **others: Any
    ) -> AppState:
        plain = getattr(optimizer, "optimizer", optimizer)  # without what accelerate puts around it
        random = RankLocal(RngState())
        return AppState(model, plain, scheduler=lr_scheduler, random=random)
