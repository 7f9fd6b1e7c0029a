"""Opens whatever can be converted, compared or looked at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_pipeline.core.errors import CheckpointNotFoundError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.registry import model_of
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.filesystem import FileSystemStorage

__all__ = ["open_source"]


def open_source(
    path: str, kind: str | None = None, options: Mapping[str, Any] | None = None, look: bool = True
) -> tuple[Directory, Manifest | None]:
    """A checkpoint of any kind.

    Args:
        kind: ``None`` to recognise it.
        options: of its layout.
        look: whether to read what it holds; without, only the directory is opened.
    """
    kind = kind or _recognized(path)
    layout = model_of("layout", kind)(kind=kind, **(options or {})).build()
    directory = FileSystemStorage().open(path, follow_links=layout.follows_links)
    return directory, layout.open(directory) if look else None


def _recognized(path: str) -> str:
    if not os.path.isdir(path):
        raise CheckpointNotFoundError(f"{path} is not there", path)
    names = os.listdir(path)
    if any(name in names for name in ("manifest.json", ".metadata")):
        return "dcp"
    return "mega" if any(name.endswith(".mega") for name in names) else "huggingface"
