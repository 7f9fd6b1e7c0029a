"""A manager over layouts other than ``dcp``."""

from pathlib import Path

import pytest
import torch

from dcp_pipeline import CheckpointManager, ConfigError, Pipeline


@pytest.mark.parametrize("threads", [1, 2])
def test_steps_of_mega(tmp_path: Path, threads: int) -> None:
    config = {"layout": "mega", "storage": {"thread_count": threads}}
    with (
        Pipeline.from_config(config) as pipeline,
        CheckpointManager(tmp_path, pipeline, keep_last=2) as manager,
    ):
        for step in (1, 2, 3, 4):
            state = {"w": torch.full((2, 1 << 20), float(step)), "step": step}
            manager.save(step, state, metrics={"loss": 1.0 / step})
        assert manager.steps() == [3, 4] and manager.latest() == 4
        found = {"w": torch.zeros(2, 1 << 20), "step": 0}
        assert manager.restore(found) == 4
        assert found["step"] == 4 and found["w"][1, 1] == 4.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-3", "step-4"]


def test_models_of_hugging_face_are_no_steps(tmp_path: Path) -> None:
    with Pipeline.from_config({"layout": "huggingface"}) as pipeline:
        with pytest.raises(ConfigError, match="keeps no notes of steps"):
            CheckpointManager(tmp_path, pipeline)
    assert list(tmp_path.iterdir()) == []
