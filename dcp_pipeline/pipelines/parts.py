"""What a config builds: one object per group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.coordination.base import Coordination
from dcp_pipeline.core.registry import model_of
from dcp_pipeline.layout.base import Layout
from dcp_pipeline.planning.base import Planner
from dcp_pipeline.rules.base import Rule
from dcp_pipeline.serialization.base import Serialization
from dcp_pipeline.staging.base import Stager
from dcp_pipeline.storage.base import Directory, Storage

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """The built kinds of one pipeline; kept and reused from save to save."""

    config: PipelineConfig
    stager: Stager
    planner: Planner
    coordination: Coordination
    serialization: Serialization
    layout: Layout
    storage: Storage
    rules: tuple[Rule, ...]

    @classmethod
    def build(cls, config: PipelineConfig) -> Parts:
        """Make every part that ``config`` names."""
        return cls(
            config=config,
            stager=config.stager.build(),
            planner=config.planner.build(),
            coordination=config.coordination.build(),
            serialization=config.serialization.build(),
            layout=config.layout.build(),
            storage=config.storage.build(),
            rules=tuple(rule.build() for rule in config.transforms),
        )

    def open_to_read(self, checkpoint_id: str) -> Directory:
        """The directory of a checkpoint to be loaded, opened as the layout wants it."""
        if self.layout.follows_links:
            return self.storage.open(checkpoint_id, follow_links=True)
        return self.storage.open(checkpoint_id)

    def serialization_of(self, kind: str) -> Serialization:
        """What reads a checkpoint of the given kind, which may not be the one that saves write.

        Raises:
            ConfigError: the kind is not known here.
        """
        if kind == self.serialization.kind:
            return self.serialization
        other: Serialization = model_of("serialization", kind)(kind=kind).build()
        return other

    def recorded_config(self) -> Mapping[str, Any]:
        """The config as a manifest keeps it."""
        return self.config.to_dict()

    def close(self) -> None:
        """Give back buffers, groups and connections."""
        self.stager.close()
        self.coordination.close()
        self.storage.close()
