"""Hydra's globals, put aside while we compose: a user's Hydra program may be running."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import VersionBase

from dcp_pipeline.config.places import CONFIG_FOLDER
from dcp_pipeline.core.registry import GROUPS, kinds

__all__ = ["hydra_of_our_own"]

_lock = threading.RLock()


@contextmanager
def hydra_of_our_own() -> Iterator[None]:
    """Give the block a Hydra that nobody has initialised, and put back the one that was there.

    Hydra's state is global to the process, so that one thread at a time composes.
    """
    with _lock:
        instances: dict[type, Any] = Singleton._instances
        before = dict(instances)
        for state in (GlobalHydra, JobRuntime, VersionBase):
            instances.pop(state, None)
        try:
            instances[ConfigStore] = _store_with_every_kind()
            yield
        finally:
            instances.clear()
            instances.update(before)


def _store_with_every_kind() -> ConfigStore:
    """Make a third party's kinds options of their groups, though no YAML file names them."""
    store = copy.copy(ConfigStore.instance())
    store.repo = store.repo | {group: dict(store.repo.get(group, {})) for group in GROUPS}
    for group in GROUPS:
        for kind in kinds(group):
            if not (CONFIG_FOLDER / group / f"{kind}.yaml").exists():
                store.store(group=group, name=kind, node={"kind": kind}, provider="dcp_pipeline")
    return store
