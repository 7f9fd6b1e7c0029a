"""What a manager can be told, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.manager import CheckpointManager
from dcp_pipeline.pipeline import Pipeline


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_last": 0}, "manager.keep_last: found 0; expected at least 1"),
        ({"keep_every": 10}, "keep_every and keep_best say what stays besides keep_last"),
        ({"keep_last": 1, "keep_best": 2}, "keep_best and metric go together"),
        ({"keep_last": 1, "metric": "loss"}, "keep_best and metric go together"),
        ({"keep_lst": 1}, "did you mean 'keep_last'"),
        ({"stop_signals": ["SIGKILL"]}, "SIGKILL"),
        ({"stop_signals": ["TERM"]}, "expected names of signals such as SIGTERM"),
        ({"save_every_minutes": 0.0}, "expected more than 0"),
        ({"mode": "best"}, "allowed: min, max"),
        ({"grace_seconds": float("inf")}, "grace_seconds"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="manager") as caught:
        CheckpointManager(tmp_path, **settings)
    assert message in str(caught.value)


def test_arguments_come_before_the_config(tmp_path: Path) -> None:
    with Pipeline.from_config({"manager": {"keep_last": 3, "keep_every": 50}}) as pipeline:
        with CheckpointManager(tmp_path, pipeline, keep_last=5) as manager:
            assert (manager.settings.keep_last, manager.settings.keep_every) == (5, 50)
        assert CheckpointManager(tmp_path, pipeline).settings == pipeline.config.manager


def test_nothing_is_touched_by_making_and_closing_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.steps() == []
    assert list(tmp_path.iterdir()) == []
