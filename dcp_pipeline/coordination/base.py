"""Who saves and loads together: the interface of a kind of coordination."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from dcp_pipeline.core.coordinator import Coordinator

__all__ = ["Coordination"]


class Coordination(ABC):
    """A configured kind of coordination, which makes the coordinator of a save or load."""

    @abstractmethod
    def coordinator(
        self,
        process_group: Any = None,
        no_dist: bool = False,
        coordinator_rank: int = 0,
        background: bool = False,
    ) -> Coordinator:
        """The coordinator of the ranks in ``process_group``.

        Args:
            process_group: ``None`` for all ranks.
            no_dist: this process alone.
            coordinator_rank: rank within the group that decides.
            background: for a save in the background, whose messages never mix with those of what
                the caller does meanwhile.

        Raises:
            NotDistributedError: there should be several ranks and there is no process group.
        """

    def close(self) -> None:
        """Give back groups."""
        return None
