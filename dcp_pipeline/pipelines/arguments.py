"""What a caller passes to a save or load, checked before anything begins."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from dcp_pipeline.core.errors import ConfigError, StateError

__all__ = ["as_text", "checked_notes"]


def checked_notes(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of the notes as JSON will have them.

    Raises:
        StateError: they are no plain JSON data.
    """
    try:
        checked: dict[str, Any] = json.loads(json.dumps(dict(notes or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StateError(f"the notes of a checkpoint are plain JSON data: {error}") from error
    return checked


def as_text(checkpoint_id: str | os.PathLike[str]) -> str:
    """A checkpoint's id as text.

    Raises:
        ConfigError: it is empty, or no path and no URI.
    """
    text = os.fspath(checkpoint_id)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"checkpoint_id has to be a path or a URI, found {checkpoint_id!r}")
    return text
