"""Removes the steps that the retention lets go: out of sight in one move, then deleted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent import futures

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.manager.config import ManagerConfig
from dcp_pipeline.manager.retention import Retention
from dcp_pipeline.manager.roots import Root

__all__ = ["Remover"]

logger = logging.getLogger("dcp_pipeline")


class Remover:
    """Tidies a root after each save; on the coordinator alone.

    What cannot be removed is logged and tried again after the next save.

    Args:
        root: where the steps are.
        settings: which of them stay, and whether a thread deletes the others.
        on_removed: called with each step that is out of sight.
    """

    def __init__(
        self, root: Root, settings: ManagerConfig, on_removed: Callable[[int], None]
    ) -> None:
        self._root = root
        self._settings = settings
        self._retention: Retention = settings.build()
        self._on_removed = on_removed
        self._lock = threading.Lock()
        self._thread: futures.ThreadPoolExecutor | None = None

    def tidy(self, protected: Collection[int], damaged: Collection[int]) -> None:
        """Remove what the retention lets go.

        Args:
            protected: steps that stay in any case: those just saved, or being saved.
            damaged: steps known not to load.
        """
        keep_last = self._settings.keep_last
        if keep_last is None:
            return
        with self._lock:
            try:
                records = self._root.records(keep_last, self._settings.metric, damaged)
            except (CheckpointError, OSError) as error:
                logger.warning("the steps in %s cannot be listed: %s", self._root.location, error)
                return
            for step in sorted(self._retention.removable(records, protected)):
                self._remove(step)

    def _remove(self, step: int) -> None:
        path = self._root.path(step)
        try:
            delete = self._root.retire(step)
        except (CheckpointError, OSError) as error:
            logger.warning("%s could not be removed: %s", path, error)
            return
        self._on_removed(step)
        if not (self._settings.background_removal and self._is_begun(delete, path)):
            _delete(delete, path)

    def _is_begun(self, delete: Callable[[], None], path: str) -> bool:
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(1, "dcp_pipeline removal")
        try:
            self._thread.submit(_delete, delete, path)
        except RuntimeError:  # the program is ending, and starts no threads any more
            return False
        return True

    def wait(self) -> None:
        """Until everything that is out of sight is deleted."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def _delete(delete: Callable[[], None], path: str) -> None:
    try:
        delete()
    except (CheckpointError, OSError) as error:
        logger.warning("%s is out of sight, but could not be deleted: %s", path, error)
