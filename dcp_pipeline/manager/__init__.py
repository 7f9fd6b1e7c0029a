"""The steps of a training run: which checkpoints there are, the newest, and which to keep."""

from dcp_pipeline.manager.manager import CheckpointManager

__all__ = ["CheckpointManager"]
