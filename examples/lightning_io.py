"""Lightning's checkpoints through dcp_pipeline: ``Trainer(plugins=[PipelineCheckpointIO()])``.

Lightning hands whole states to the rank that saves, so this process saves alone. Checkpoints are
directories, written in the background, hashed, and committed at once; nothing is unpickled from
them that ``torch.load(weights_only=True)`` would refuse.
"""

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from dcp_pipeline import Pipeline, PipelineConfig, load_keys


class PipelineCheckpointIO(CheckpointIO):
    """Saves in the background; the next save, a load or a removal wait for what is under way.

    Args:
        config: of the pipeline; the default one if there is none.
    """

    def __init__(self, config: PipelineConfig | None = None) -> None:
        self._pipeline = Pipeline(config or PipelineConfig())

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        self._pipeline.async_save(checkpoint, path, no_dist=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | torch.device | str | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        self._pipeline.wait()
        return load_keys(path)  # in host memory; Lightning copies it to where it belongs

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._pipeline.wait()
        shutil.rmtree(path)

    def teardown(self) -> None:
        self._pipeline.close()
